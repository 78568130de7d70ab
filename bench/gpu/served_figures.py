"""What follows from a measurement of Penstock in front of a GPU: rows, ratios with their goals, notes, plots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench import plots
from bench.gpu.loads import ClosedLoad, PredictedLoad, as_compared, between, of_rows, predictions
from bench.gpu.served import DIRECT, LevelCosts, ServedMeasurement, ServedOptions
from bench.gpu.server import PROMPT_ROWS
from bench.gpu.upstream import NAME as PENSTOCK
from bench.report import Ratio, Report, columns
from planner.fit import FIGURES, EngineFit, ServedLimits, constant_errors_of, errors_of, worst_errors_of

COLUMNS = columns("""
    clients: at once; way: way; tokens_s: tok/s .0; share: of direct .3;
    ttft_p50_ms: TTFT p50, ms .1; ttft_p90_ms: p90 .1; added_ms: added, p50 .1;
    itl_p50_ms: ITL p50, ms .2; itl_p99_ms: p99 .2;
    penstock_us: CPU us/token, Penstock .1; engine_us: engine .1; joules_token: J/token .4;
    role: role; predicted_tokens_s: predicted tok/s .0; predicted_ttft_p50_ms: TTFT p50 .1
""")
NO_GOAL = "tpot_p50_s"
WAYS = (DIRECT, PENSTOCK)


def nearest(loads: Sequence[ClosedLoad], options: ServedOptions) -> tuple[EngineFit, list[PredictedLoad]]:
    """What the simulator says of these loads: of two fits, the one that is nearer to the loads that it was fitted to.

    One takes it that texts begin while a step is under way, as they do at an engine without anything before it; the
    other that they begin with a step, as those do that took a while on their way. The first is that of llama.cpp, whose
    order of prompts this engine does not have. Raises PlanError.
    """
    limits = ServedLimits(options.slots, options.slots * options.context, PROMPT_ROWS)
    fits = [predictions(loads, replace(limits, by_slot=under_way)) for under_way in (True, False)]
    return min(fits, key=lambda fit: _fitted_error(fit[1]))


def _fitted_error(found: Sequence[PredictedLoad]) -> float:
    """The mean over the figures of the error of the loads that were fitted, in the median; those held out are not
    looked at."""
    errors = errors_of([replace(each, held_out=not each.held_out) for each in as_compared(found)])
    return fmean(getattr(errors, key) for key in FIGURES)


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of one turn: measured, predicted, and what it cost."""

    found: PredictedLoad
    costs: LevelCosts


class ServedFigures:
    """Figures of one measurement. Raises PlanError where its requests tell no step times."""

    def __init__(self, measurement: ServedMeasurement) -> None:
        self.measurement, self.levels = measurement, measurement.options.levels
        self._predicted = [nearest(of_rows(turn.requests), measurement.options) for turn in measurement.turns]

    def rows(self) -> list[dict[str, Any]]:
        """One for each level and way, each figure the median of the turns."""
        return [self._row(clients, way) for clients in self.levels for way in WAYS]

    def _of(self, way: str) -> list[list[_Level]]:
        """The levels of each turn of one way."""
        turns = zip(self.measurement.turns, self._predicted, strict=True)
        return [
            [_Level(*pair) for pair in zip(found, turn.costs, strict=True)]
            for turn, (_, found) in turns
            if turn.way == way
        ]

    def _at(self, way: str, clients: int) -> list[_Level]:
        return [level for turn in self._of(way) for level in turn if level.costs.clients == clients]

    def _row(self, clients: int, way: str) -> dict[str, Any]:
        levels = self._at(way, clients)
        tokens = sum(each.costs.tokens for each in levels)

        def seen(key: str) -> float:
            return float(median(getattr(each.found.load.figures, key) for each in levels))

        def said(key: str) -> float:
            return float(median(getattr(each.found.predicted, key) for each in levels))

        joules = [each.costs.joules for each in levels]
        return {
            "clients": clients,
            "way": way,
            "requests": sum(len(each.found.load.texts) for each in levels),
            "tokens_s": seen("tokens_s"),
            "share": None if way == DIRECT else median(self._shares(clients)),
            "ttft_p50_ms": 1e3 * seen("ttft_p50_s"),
            "ttft_p90_ms": 1e3 * seen("ttft_p90_s"),
            "added_ms": None if way == DIRECT else median(self._added_ms(clients)),
            "itl_p50_ms": 1e3 * median(each.costs.itl_p50_s for each in levels),
            "itl_p99_ms": 1e3 * median(each.costs.itl_p99_s for each in levels),
            "penstock_us": None if way == DIRECT else 1e6 * sum(each.costs.penstock_cpu_s for each in levels) / tokens,
            "engine_us": 1e6 * sum(each.costs.engine_cpu_s for each in levels) / tokens,
            "joules_token": None if None in joules else sum(filter(None, joules)) / tokens,
            "role": "held out" if levels[0].found.held_out else "fitted",
            "predicted_tokens_s": said("tokens_s"),
            "predicted_ttft_p50_ms": 1e3 * said("ttft_p50_s"),
            "predicted_ttft_p90_ms": 1e3 * said("ttft_p90_s"),
            "client_cpu": max(each.costs.client_cpu for each in levels),
        }

    def _pairs(self, clients: int, key: str) -> list[tuple[float, float]]:
        """A figure through Penstock and direct, of the turns with the same prompts."""
        both = [[getattr(each.found.load.figures, key) for each in self._at(way, clients)] for way in WAYS]
        return [(through, direct) for direct, through in zip(*both, strict=True)]

    def _shares(self, clients: int) -> list[float]:
        return [through / direct for through, direct in self._pairs(clients, "tokens_s")]

    def _added_ms(self, clients: int) -> list[float]:
        return [1e3 * (through - direct) for through, direct in self._pairs(clients, "ttft_p50_s")]

    # --- ratios -------------------------------------------------------------------------------------------------------

    def ratios(self) -> list[Ratio]:
        """Throughput, TTFT, energy, the kill, then what the simulator says."""
        return [*self._gateway(), *self._energy(), *self._killed(), *self._simulated()]

    def _gateway(self) -> list[Ratio]:
        most = self.levels[-1]
        kept = {clients: median(self._shares(clients)) for clients in self.levels}
        least, shares = min(kept, key=lambda clients: kept[clients]), self._shares(most)
        added = {clients: median(self._added_ms(clients)) for clients in self.levels}
        slowest = max(added, key=lambda clients: added[clients])
        what = "TTFT p50 through Penstock - direct, ms"
        knee = self.measurement.tuned["knee"]["concurrency"]
        return [
            Ratio.held(None, f"c={most}: tokens per second through Penstock / direct", median(shares), digits=3,
                       rounds=shares),
            Ratio.held(None, "the same at its worst level", kept[least], digits=3,
                       rounds=self._shares(least)),
            Ratio.held("gateway.upstream_ttft", f"{what}, at its worst level", added[slowest],
                       rounds=self._added_ms(slowest)),
            Ratio.held(None, f"{what}, c=1", added[1], rounds=self._added_ms(1)),
            Ratio.held(None, "knee by `penstock tune frontier` of Penstock, at once", float(knee), digits=0),
        ]  # fmt: skip

    def _energy(self) -> list[Ratio]:
        energy = self.measurement.energy
        if energy.nvml_j is None:
            return []
        found = [Ratio(what="J/token of the turns through Penstock, by NVML", value=energy.nvml_j / energy.tokens,
                       digits=4)]  # fmt: skip
        if energy.metric_j is not None:
            what = "joules by penstock_gpu_energy_joules / by NVML"
            found.append(Ratio(what=what, value=energy.metric_j / energy.nvml_j, digits=3))
        if energy.report_j_token is not None:
            value = energy.report_j_token * energy.tokens / energy.nvml_j
            found.append(Ratio(what="J/token by `penstock report` / by NVML", value=value, digits=3))
        return found

    def _killed(self) -> list[Ratio]:
        killed = self.measurement.killed
        what = f"{killed.streams} streams whose worker is killed"
        return [
            Ratio.none(f"{what}: had ended before, or no worker was started again", killed.unmet),
            Ratio.none(f"{what}: broken, or with another number of tokens", len(killed.wrong)),
            Ratio.none(f"{what}: texts other than the direct ones", killed.differ),
            Ratio.none("direct texts of few streams at once, other than of all at once", killed.direct_differ),
            Ratio(what=f"{what}: the longest silence, p50, s", value=median(killed.silences_s)),
        ]

    def _simulated(self) -> list[Ratio]:
        """Errors of the loads that were held out, in each turn."""
        found = []
        for way in WAYS:
            turns = [[level.found for level in turn] for turn in self._of(way)]
            compared = [as_compared(turn) for turn in turns]
            lines = [as_compared(between(turn)) for turn in turns]
            for key, figure in FIGURES.items():
                what, goal = f"{way}: {figure} of the held-out loads", None if key == NO_GOAL else "frontier.error"
                for end, held, said, errors in (
                    ("median error, %", goal, compared, errors_of),
                    ("always the fitted median, %", None, compared, constant_errors_of),
                    ("a line between the fitted ones, %", None, lines, errors_of),
                    ("error of the worst, %", None, compared, worst_errors_of),
                ):
                    each = [100 * getattr(errors(loads), key) for loads in said]
                    found.append(Ratio.held(held, f"{what}, {end}", median(each), digits=1, rounds=each))
        return found

    # --- words --------------------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """What the table does not say."""
        measurement, options, killed = self.measurement, self.measurement.options, self.measurement.killed
        return [
            f"`direct` is the engine's own server: a step loop in PyTorch with random weights in the shape of "
            f"{options.model}, {options.slots} slots, batching in flight; `penstock` is `penstock up --upstream` in "
            f"front of it, with the durable log. Each way had two turns: direct, penstock, penstock, direct. The first "
            "request of each client counts for throughput alone.",
            f"Its logits are off by {measurement.logits_off_by:.4f} from float32, with texts at different places.",
            f"Penstock's CPU is that of all processes that `penstock up` starts, its store included; in the direct "
            f"turns they took {1e3 * self._idle_cores():.0f} ms a second. The load generator used at most "
            f"{100 * max(each.client_cpu for turn in measurement.turns for each in turn.costs):.0f} % of one core.",
            f"Killed: with answers of {killed.tokens} tokens, when each had brought {min(killed.killed_at)} to "
            f"{max(killed.killed_at)}; the longest silences were {min(killed.silences_s):.1f} to "
            f"{max(killed.silences_s):.1f} s, and the worker was started again {killed.restarts} time(s). The engine "
            "computed all steps in one size for this part, so that equal requests have equal answers."
            + "".join(f" Wrong: {each}." for each in killed.wrong[:3]),
            *self._energy_notes(),
            *self._fits(),
        ]

    def _energy_notes(self) -> list[str]:
        if self.measurement.energy.nvml_j is None:
            return []
        return [
            "NVML, Penstock's metric and its report all have the joules from one counter of the driver: that they "
            "agree shows that Penstock loses none on the way, not that the counter is right."
        ]

    def _idle_cores(self) -> float:
        costs = [each for turn in self.measurement.turns if turn.way == DIRECT for each in turn.costs]
        return sum(each.penstock_cpu_s for each in costs) / sum(each.seconds for each in costs)

    def _fits(self) -> list[str]:
        """The step times of the first turn of each way."""
        found = []
        for way in WAYS:
            number = next(at for at, turn in enumerate(self.measurement.turns) if turn.way == way)
            fit = self._predicted[number][0]
            begins = "while a step is under way" if fit.limits.by_slot else "with a step"
            small, (fixed_s, token_s, square_s) = fit.times.small, fit.times.prefill
            found.append(
                f"{way}, fitted, with texts that begin {begins}: a step takes {1e3 * small.fixed_s:.2f} ms, "
                f"{1e3 * small.text_s:.4f} ms more for each "
                f"text and {1e6 * small.held_s:.3f} us for each token in the cache; n tokens of prompts add "
                f"{1e3 * fixed_s:.2f} + {1e3 * token_s:.4f} n + {1e3 * square_s:.6f} n^2 ms; a first token comes "
                f"{1e3 * fit.delay_s:.1f} ms after its step."
            )
        return found


def draw(found: Report, folder: Path) -> list[Path]:
    """Throughput and TTFT over concurrency, both ways, with what the simulator says of the direct one."""
    written = []
    for key, title, unit in (
        ("tokens_s", "Throughput", "tokens/s"),
        ("ttft_p50_ms", "Time to the first token, p50", "ms"),
    ):
        rows = {way: [row for row in found.rows if row["way"] == way] for way in WAYS}
        series = {way: [(row["clients"], row[key]) for row in each] for way, each in rows.items()}
        series["direct, simulated"] = [(row["clients"], row[f"predicted_{key}"]) for row in rows[DIRECT]]
        written += plots.lines(
            folder / f"gpu-served-{key.partition('_')[0]}", f"{title} over concurrency", series,
            x=plots.Axis(title="requests at once", log=True), y=plots.Axis(title=unit),
        )  # fmt: skip
    return written
