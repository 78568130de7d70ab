"""Closed loads of the GPU benchmarks: an engine whose step times are known is predicted."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from bench.gpu.loads import (
    LEVELS,
    ClosedLoad,
    PredictedLoad,
    as_compared,
    as_rows,
    between,
    differences,
    frontier,
    length_mix,
    of_rows,
    predictions,
    requests_of,
    served_text,
)
from bench.table1.client import TimedAnswer
from planner.fit import (
    DecodeRegime,
    EngineFit,
    FittedTimes,
    ServedLimits,
    ServedText,
    errors_of,
    predicted_clients,
    worst_errors_of,
)

pytestmark = pytest.mark.slow

STEP_TOKENS = {"penstock": 128, "llama-server": 2048}
REGIME = DecodeRegime(0.036, 0.0, 0.0076)
LIMITS = {name: ServedLimits(32, 32 * 512, tokens, by_slot=True) for name, tokens in STEP_TOKENS.items()}
KNOWN = EngineFit(FittedTimes((0.0, 0.0055, 0.0), REGIME, REGIME, 0.018), LIMITS["penstock"], 0.004, 0.0, 0)
"""About what llama.cpp takes of one core for SmolLM2-135M."""


class NoisyTimes(FittedTimes):
    """KNOWN's step times, each of them longer or shorter by about 15 %."""

    random = Random(1)

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        return FittedTimes.step_s(self, texts, held, prefilled, squares) * self.random.lognormvariate(0, 0.15)


def known_loads(name: str = "penstock", times: FittedTimes = KNOWN.times) -> list[ClosedLoad]:
    """As an engine with these step times would serve them, one after the other."""
    known, found, begin_s = replace(KNOWN, limits=LIMITS[name], times=times), [], 0.0
    for clients in LEVELS:
        texts = predicted_clients(known, clients, length_mix().sample(requests_of(clients), Random(clients)))
        served = [
            ServedText(
                "engine", begin_s + text.arrived_s, begin_s + text.arrived_s, begin_s + (text.first_s or 0.0),
                begin_s + (text.ended_s or 0.0), begin_s + (text.first_s or 0.0), text.prompt, text.output,
            )
            for text in sorted(texts, key=lambda each: each.arrived_s)
        ]  # fmt: skip
        found.append(ClosedLoad(clients, served))
        begin_s = max(text.last_s for text in served) + 5.0
    return found


@pytest.mark.parametrize("name", STEP_TOKENS)
def test_loads_of_known_step_times_are_predicted(name: str) -> None:
    """From every second of them, whatever a step computes: the step times come back, too."""
    fit, found = predictions(known_loads(name), LIMITS[name])
    assert [each.held_out for each in found] == [False, True] * 5
    assert fit.times.lone_s == pytest.approx(0.018, rel=0.02)
    for texts, prefilled in ((2, 0), (8, 0), (32, 0), (4, 64)):
        said, true = (times.step_s(texts, 80 * texts, prefilled) for times in (fit.times, KNOWN.times))
        assert said == pytest.approx(true, rel=0.06)
    errors, worst = errors_of(as_compared(found)), worst_errors_of(as_compared(found))
    assert worst.tokens_s < 0.05 and max(errors.ttft_p50_s, errors.ttft_p90_s) < 0.1
    assert max(worst.ttft_p50_s, worst.ttft_p90_s) < 0.25, "a step more or less is a quarter of a short wait"


@pytest.mark.parametrize("name", STEP_TOKENS)
def test_noise_in_the_steps_is_not_taken_for_what_they_cost(name: str) -> None:
    """Of a dozen measurements of one engine, the prediction is off by so much in the median."""
    noisy = NoisyTimes(KNOWN.times.prefill, REGIME, REGIME, KNOWN.times.lone_s)
    noisy.random.seed(7)
    each = [errors_of(as_compared(predictions(known_loads(name, noisy), LIMITS[name])[1])) for _ in range(12)]
    assert median(errors.tokens_s for errors in each) < 0.05
    assert median(errors.ttft_p50_s for errors in each) < 0.1
    assert median(errors.ttft_p90_s for errors in each) < 0.1


def test_a_second_measurement_of_a_load_shows_what_the_machine_does() -> None:
    loads = known_loads()
    slow = [text._replace(last_s=text.first_s + 1.5 * (text.last_s - text.first_s)) for text in loads[0].texts]
    found = differences(loads[:1], [ClosedLoad(1, slow)])
    assert found.tpot_p50_s == pytest.approx(0.5) and found.ttft_p50_s == 0.0 < found.tokens_s


def test_a_line_between_the_fitted_loads_stands_beside_the_simulator() -> None:
    """Figures that follow a power of the clients lie on it, between fitted loads and beyond them; what is held out does
    not move it."""

    def load_of(clients: int) -> ClosedLoad:
        ttft_s, decode_s = 0.1 * clients**0.5, 0.2 * clients
        return ClosedLoad(clients, [
            ServedText("engine", at, at, at + ttft_s, at + ttft_s + decode_s, at + ttft_s, 64, 11)
            for at in map(float, range(2 * clients))
        ])  # fmt: skip

    loads = [PredictedLoad(load_of(clients), number % 2 == 1, load_of(1).figures) for number, clients in
             enumerate((1, 2, 4, 8))]  # fmt: skip
    for each in between(loads):
        seen = each.load.figures
        assert each.predicted.ttft_p50_s == pytest.approx(seen.ttft_p50_s), each.load.clients
        assert each.predicted.tpot_p50_s == pytest.approx(seen.tpot_p50_s), each.load.clients
    other = replace(loads[1], load=ClosedLoad(2, load_of(9).texts))
    assert between([loads[0], other, *loads[2:]])[1].predicted == between(loads)[1].predicted


def test_the_error_is_that_of_the_loads_that_were_held_out() -> None:
    """A prediction of fitted loads would be none."""
    loads = known_loads()
    slow = [text._replace(last_s=text.first_s + 3 * (text.last_s - text.first_s)) for text in loads[5].texts]
    loads[5] = ClosedLoad(loads[5].clients, slow)
    _, found = predictions(loads, KNOWN.limits)
    assert found[5].held_out and found[5].predicted.tokens_s > 1.5 * found[5].load.figures.tokens_s


def test_first_requests_of_clients_count_for_no_first_token() -> None:
    """They come at once: with two requests of a client, the median would lie between them and the others."""
    loads = known_loads()
    load_ = loads[-1]
    later = sorted(text.heard_s - text.arrived_s for text in load_.texts[load_.clients :])
    assert load_.figures.ttft_p90_s <= later[-1]
    late = [text._replace(heard_s=text.heard_s + 100.0) for text in load_.texts[: load_.clients]]
    changed = ClosedLoad(load_.clients, [*late, *load_.texts[load_.clients :]])
    assert changed.figures == load_.figures


def test_rows_of_a_file_are_the_loads() -> None:
    loads = known_loads()
    again = of_rows(as_rows(loads))
    assert [each.clients for each in again] == [each.clients for each in loads]
    assert again[3].figures.tokens_s == pytest.approx(loads[3].figures.tokens_s, rel=0.01)
    assert frontier(again).knee.batch == frontier(loads).knee.batch


def test_an_answer_as_its_client_saw_it() -> None:
    text = served_text(TimedAnswer(1.0, [1.5, 2.0, 3.0], 3, prompt=40))
    assert (text.arrived_s, text.first_s, text.last_s, text.prompt, text.answer) == (1.0, 1.5, 3.0, 40, 3)
