"""`python -m bench.clients`: clients, agents and load generators of others, each unchanged, against a real Penstock.

Each client runs its program of examples/clients for each case, once against the simulated engine and once against the
embedded model. What an engine lacks must be refused with a 400 that says so. A client whose environment is not there
is left out, and the table says so; --install makes the environments, in the folder of the variable
PENSTOCK_BENCH_CACHE. The exit code is 1 if a case failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.clients.cases import CaseOutcome, run_case
from bench.clients.catalogue import CASES, CLIENTS, ENGINES, MODEL, SIM, ClientProgram
from bench.clients.loads import LOADS, OUTPUT_TOKENS, REQUESTS, ClientLoadFailed, LoadGenerator, fault_of, run_load
from bench.environments import Absent
from bench.penstock import Penstock
from bench.processes import Died
from bench.program import CACHE, OUT, BenchProgram, Option, ProgramRun, Testbed, check_names
from bench.report import Ratio, columns
from workers.engines.llamacpp.weights import WeightsError, fetch

NAME = "clients"
TOKENS = "tokens"
TITLES = {SIM: "simulated", MODEL: "embedded"}
SETTINGS: Mapping[str, Mapping[str, object]] = {SIM: {"sim.step_ms": 5}, MODEL: {}}

Row = dict[str, Any]

COLUMNS = columns("""
    client: client; version: version; engine: engine; plain: plain; streamed: streamed; tools: tool loop;
    structured: structured; resumed: API killed; tokens: tokens asked for
""")


class ClientRun:
    """What is there to be run, what came of it, and why something could not."""

    def __init__(self, run: ProgramRun, stage: Testbed) -> None:
        self._run, self._stage = run, stage
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.notes: list[str] = []
        self._places: dict[str, Path] = {}

    def prepare(self, client: ClientProgram | LoadGenerator) -> bool:
        """Find or make a client's environment; whether it is there."""
        try:
            place = client.environment.made()
            if place is None and self._run.args.install:
                place = client.environment.prepare(self._stage.say)
            reason = "not installed (--install)"
        except Absent as error:
            place, reason = None, str(error)
        if place is None:
            self.notes.append(f"{client.title} was left out: {reason}.")
            return False
        self._places[client.name] = place
        return True

    def run(self, client: ClientProgram | LoadGenerator, penstock: Penstock) -> None:
        """Run all that a client has on one engine."""
        if isinstance(client, LoadGenerator):
            self._load(client, penstock)
        else:
            self._client(client, penstock)

    def _client(self, client: ClientProgram, penstock: Penstock) -> None:
        engine, cells = TITLES[penstock.engine], {}
        for case in client.cases:
            self._stage.say(f"{client.title}, {engine}: {case}")
            log = penstock.folder / f"{client.name}-{case}.log"
            outcome = run_case(client, self._places[client.name], penstock, case, log)
            cells[case] = outcome.cell
            self._note(client, engine, case, outcome)
        self.rows.append(self._row(client, engine) | cells)

    def _note(self, client: ClientProgram, engine: str, case: str, outcome: CaseOutcome) -> None:
        if outcome.wrong:
            self.wrong.append(f"{client.title}, {engine}: {outcome.wrong}")
        if outcome.skipped:
            self.notes.append(f"{client.title}, {engine}, {case}: not run: {outcome.skipped}.")

    def _load(self, load: LoadGenerator, penstock: Penstock) -> None:
        engine = TITLES[penstock.engine]
        self._stage.say(f"{load.title}, {engine}")
        folder = penstock.folder / load.name
        folder.mkdir()
        try:
            counts = run_load(load, self._places[load.name], penstock, folder)
            wrong = fault_of(counts)
        except ClientLoadFailed as error:
            counts, wrong = [], str(error)
        if wrong:
            self.wrong.append(f"{load.title}, {engine}: {wrong}")
        self.rows.append(self._row(load, engine) | {TOKENS: "**failed**" if wrong else "yes", "counts": counts})

    def _row(self, client: ClientProgram | LoadGenerator, engine: str) -> Row:
        name, _, version = client.environment.packages[0].replace("==", "@").rpartition("@")
        return dict.fromkeys((*CASES, TOKENS)) | {
            "client": client.title,
            "version": f"{name} {version}",
            "engine": engine,
        }


@contextmanager
def _serving(engine: str, run: ProgramRun, stage: Testbed) -> Any:
    data_dir = run.args.cache
    if engine == MODEL:
        fetch(data_dir, lambda _what, _done, _of: None)
    with Penstock(stage.room(engine), engine=engine, settings=SETTINGS[engine], data_dir=data_dir) as penstock:
        yield penstock


def _work(run: ProgramRun) -> int:
    known = {each.name: each for each in (*CLIENTS, *LOADS)}
    wanted = [name for name in (run.args.clients or ",".join(known)).split(",") if name]
    check_names("client", wanted, known)
    with Testbed(run.console, "starting", len(wanted) * len(ENGINES)) as stage:
        found = ClientRun(run, stage)
        chosen = [known[name] for name in wanted if found.prepare(known[name])]
        for engine in ENGINES:
            with _serving(engine, run, stage) as penstock:
                for client in chosen:
                    found.run(client, penstock)
                    stage.done()
        if found.wrong:
            stage.keep()
    order = {each.title: number for number, each in enumerate(known.values())}
    found.rows.sort(key=lambda row: order[row["client"]])
    title = "Clients of others, unchanged"
    ratios = [Ratio.none("cases that failed", float(len(found.wrong)))]
    settings = {"requests": REQUESTS, "tokens": OUTPUT_TOKENS}
    return int(
        run.keep(run.result(NAME, title, COLUMNS, found.rows, ratios, [*found.wrong, *found.notes], **settings)).missed
    )


main = BenchProgram("penstock bench clients", __doc__, _work, Died, WeightsError, OSError).taking(
    Option("--clients", help="only these, separated by commas"),
    Option("--install", action="store_true", help="make the environments that are not there"),
    CACHE,
    OUT,
)

if __name__ == "__main__":
    main.exit()
