"""The definitions of the latencies, and the split of a request's time into its parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from telemetry import latency

WHOLE = latency.Stamps(
    received=1_000, accepted=3_000, started=10_000, claimed=10_000, released=11_000, scheduled=31_000,
    first_token=56_000, last_token=156_000, first_got=57_000, first_sent=57_500, last_got=157_000, last_sent=158_000,
    ended=156_800,
)  # fmt: skip


def test_time_per_output_token_is_seconds_per_token() -> None:
    """Eleven tokens in half a second: 50 ms each, not 20 a second; nothing lies between fewer than two."""
    assert latency.time_per_output_token(2.0, 2.5, 11) == pytest.approx(0.05)
    assert latency.time_per_output_token(2.0, 2.5, 1) is None and latency.time_per_output_token(2.0, 2.5, 0) is None


def test_a_chunk_of_several_tokens_is_so_many_equal_gaps() -> None:
    """30 ms for three tokens are 10 ms each; a chunk that counts none is one gap."""
    assert latency.inter_token_latency(1.0, 1.03, 3) == pytest.approx(0.01)
    assert latency.inter_token_latency(1.0, 1.03, 0) == pytest.approx(0.03)


def test_a_whole_request() -> None:
    """Every part by hand, in microseconds."""
    found = latency.split(WHOLE, over=True)
    assert found.parts == {
        "ingress": 2_000, "queue": 7_000, "retries": 0, "gate": 1_000, "engine_wait": 20_000, "prefill": 25_000,
        "decode": 100_000, "egress_tail": 2_000, "egress_first": 1_500,
    }  # fmt: skip
    assert found.total == found.end_to_end == 157_000 and found.until == "last_sent" and not found.reasons
    assert {name: found.group(name) for name in latency.GROUPS} == {
        "gateway": 5_000, "queue": 27_000, "recovery": 0, "engine": 125_000
    }  # fmt: skip


@given(st.lists(st.integers(0, 10**7), min_size=13, max_size=13), st.sets(st.sampled_from(range(1, 8))))
def test_the_parts_sum_to_the_end_to_end_time(steps: list[int], missing: set[int]) -> None:
    """Whatever stamps in between are missing: no time is lost or counted twice."""
    names = ["received", *(part.ends for part in latency.PARTS)]
    at, stamps = 10**15, latency.Stamps()
    for number, (name, step) in enumerate(zip(names, steps, strict=False)):
        at += step
        if number not in missing:
            stamps = replace(stamps, **{name: at})
    found = latency.split(replace(stamps, ended=at), over=True)
    assert found.end_to_end is not None and found.total == found.end_to_end
    assert all(time is not None or name in found.reasons for name, time in found.parts.items())


@pytest.mark.parametrize("step", range(len(latency.PARTS)))
def test_a_delay_is_in_exactly_one_part(step: int) -> None:
    """50 ms between two stamps lengthen the part between them and no other (beside egress-first, which overlaps)."""
    names = [part.ends for part in latency.PARTS]
    names = [*names[step:], *(("first_got", "first_sent") if "first_token" in names[step:] else ())]
    late = {name: getattr(WHOLE, name) + 50_000 for name in names}
    before, after = latency.split(WHOLE, over=True), latency.split(replace(WHOLE, **late), over=True)
    grown = {name: (after.parts[name] or 0) - (time or 0) for name, time in before.parts.items()}
    assert grown == {name: 50_000 if name == latency.PARTS[step].name else 0 for name in grown}


@given(st.lists(st.integers(0, 2**50), min_size=8, max_size=8), st.sets(st.integers(0, 7)))
def test_the_parts_up_to_the_last_token_are_those_of_the_split(steps: list[int], missing: set[int]) -> None:
    """Whichever stamps are missing: the counted parts are those that the timing of the job shows."""
    times = [0 if number in missing else sum(steps[: number + 1]) + 1 for number in range(8)]
    names = ("received", *(part.ends for part in latency.PARTS[:-1]))
    found = latency.split(latency.Stamps(**dict(zip(names, times, strict=True))), over=False)
    known = {part.name: found.parts[part.name] for part in latency.PARTS[:-1] if found.parts[part.name] is not None}
    assert latency.engine_parts(times) == known


def test_a_job_that_ended_in_its_lane() -> None:
    """Expired: the lane has all its time; the error's way to the client is the tail."""
    expired = latency.Stamps(received=1_000, accepted=2_000, ended=62_000, last_sent=64_000)
    found = latency.split(expired, over=True)
    assert found.parts["queue"] == 60_000 and found.parts["egress_tail"] == 2_000 and found.parts["decode"] is None
    assert found.reasons["decode"] == "the job ended before" and found.total == found.end_to_end == 63_000


def test_a_resumed_job() -> None:
    """Time from the first claim to the last is the earlier attempts'; their first token has no stamp."""
    found = latency.split(replace(WHOLE, started=4_000, first_got=6_000, first_sent=6_500), over=True)
    assert found.parts["queue"] == 1_000 and found.parts["retries"] == 6_000
    assert found.parts["egress_first"] is None and "earlier attempt" in found.reasons["egress_first"]
    assert found.total == found.end_to_end


SHOWN_EARLY = WHOLE.continued(shown=14_000, claimed=11_000, kept=6_000)
"""Its first attempt, claimed at 10,000, showed nothing; the second generated from 14,000 to 20,000; the last one from
56,000 on."""


def test_a_first_token_of_an_earlier_attempt_stays_the_first() -> None:
    """What the reader saw. The pause after it is lost to retries, like the attempt that showed nothing; decode is what
    the attempts generated of the text."""
    stamps = replace(SHOWN_EARLY, first_got=14_400, first_sent=14_600)
    found = latency.split(stamps, over=True)
    assert found.parts == {
        "ingress": 2_000, "queue": 7_000, "retries": 1_000 + 36_000, "gate": None, "engine_wait": None,
        "prefill": 3_000, "decode": 6_000 + 100_000, "egress_tail": 2_000, "egress_first": 600,
    }  # fmt: skip
    assert list(found.parts)[2:7] == ["gate", "engine_wait", "prefill", "retries", "decode"], "as they happened"
    assert found.total == found.end_to_end == 157_000 and found.group("recovery") == 37_000
    assert latency.first_seen(stamps, whole=False) == 14_600 and latency.first_seen(stamps, whole=True) == 158_000
    assert latency.first_seen(replace(stamps, first_sent=0), whole=False) == 14_000
    times = (1_000, 3_000, 10_000, 11_000, 0, 0, 14_000, 156_000)
    lost = latency.lost_between(14_000, 56_000, 6_000)
    counted = latency.engine_parts(times, lost)
    assert counted == {name: spent for name, spent in found.parts.items() if spent and not name.startswith("egress")}
    cut = (*times[:3], 9_500, *times[4:])  # a claim is known to the millisecond, and may seem to be before the start
    assert latency.engine_parts(cut, lost)["retries"] == counted["retries"] - 1_500


@pytest.mark.parametrize(("kept", "retries", "decode"), [(6_000, 1_000 + 136_800, 6_000), (0, 1_000 + 142_800, 0)])
def test_a_job_that_ended_without_another_token_lost_the_rest(kept: int, retries: int, decode: int) -> None:
    """Its last attempt gave none, or it was given up; of a text that begins again nothing was kept."""
    ended = replace(WHOLE, first_token=0, last_token=0, last_sent=0).continued(14_000, 11_000, kept)
    found = latency.split(ended, over=True)
    assert (found.parts["retries"], found.parts["decode"]) == (retries, decode)
    assert found.total == found.end_to_end == 155_800 and found.until == "ended"


def test_the_engine_parts_of_a_job_that_died_did_not_happen() -> None:
    """Only the answer can be unsent; prefill and decode no worker came to."""
    died = latency.Stamps(received=1, accepted=2, started=3, claimed=3, released=4, ended=9)
    found = latency.split(died, over=True, unsent="nobody waited")
    assert found.parts["engine_wait"] == 5
    assert found.reasons == {
        "prefill": "no worker got so far",
        "decode": "no worker got so far",
        "egress_tail": "nobody waited",
        "egress_first": "nobody waited",
    }
