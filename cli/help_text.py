"""Help pages of commands: each ends with its examples."""

from __future__ import annotations

from typing import Any

import click

MAX_SENTENCE = 300
"""Characters of the first sentence of a command's help, in the help of its group."""


class CommandWithExamples(click.Command):
    """A click command whose help page has examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from cli.help_text import EXAMPLES  # noqa: PLC0415 - only a help page needs them

        super().format_epilog(ctx, formatter)
        if lines := EXAMPLES.get(ctx.command_path):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in lines))


class Group(CommandWithExamples, click.Group):
    """A click group whose help page has examples; `-h` also shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **kwargs)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, but a mistyped name gets the nearest ones."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise click.exceptions.NoSuchCommand(args[0], possibilities=names, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, but each sentence is wrapped, not cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [
            (name, command.get_short_help_str(MAX_SENTENCE))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if shown:
            with formatter.section("Commands"):
                formatter.write_dl(shown)


EXAMPLES: dict[str, tuple[str, ...]] = {
    "penstock": (
        "penstock up --engine sim",
        'penstock chat "What is a penstock?"',
        'penstock submit "Write a haiku about water." --wait',
        "penstock jobs ls",
        'eval "$(penstock completion bash)"',
    ),
    "penstock up": (
        "penstock up",
        "penstock up --engine sim --workers 2",
        "penstock up --port 9000 --detach",
        "penstock up --upstream http://127.0.0.1:8080/v1",
        "PENSTOCK_REDIS_URL=redis://127.0.0.1:6379/0 penstock up",
    ),
    "penstock down": ("penstock down", "penstock down --now", "penstock down --data-dir /srv/penstock"),
    "penstock report": (
        "penstock report --since 1h",
        "penstock report --since 24h --lane interactive --html report.html",
        "penstock report --compare 2h..1h 1h..",
    ),
    "penstock records": ("penstock records export --parquet records",),
    "penstock records export": (
        "penstock records export --parquet records",
        "penstock records export --parquet records --since 1d",
    ),
    "penstock ps": ("penstock ps", "penstock ps --json", "penstock ps --redis-url redis://127.0.0.1:6379/0"),
    "penstock chat": (
        'penstock chat "What is a penstock?"',
        'penstock chat "Summarize:" < report.txt',
        "penstock chat",
        'penstock chat "Name a river." --system "Answer in one word."',
    ),
    "penstock submit": (
        'penstock submit "Write a haiku about water."',
        'penstock submit "Write a haiku about water." --wait 30',
        'penstock submit "Name a river." --priority batch --idempotency-key river-1',
        'penstock submit "Name a river." --webhook crm',
        "penstock submit - < prompt.txt",
    ),
    "penstock top": ("penstock top", "penstock top --once", "penstock top --json --interval 10"),
    "penstock console": ("penstock console", "penstock console --no-browser"),
    "penstock jobs": ("penstock jobs ls", "penstock jobs show job_0074d316", "penstock jobs cancel job_0074d316"),
    "penstock jobs ls": (
        "penstock jobs ls",
        "penstock jobs ls --status failed --limit 100",
        "penstock jobs ls --lane batch --since 2h",
        "penstock jobs ls --json",
    ),
    "penstock jobs show": (
        "penstock jobs show job_0074d316",
        "penstock jobs show job_0074d316 --input",
        "penstock jobs show job_0074d316 --json",
    ),
    "penstock logs": (
        "penstock logs -f",
        "penstock logs --job job_0074d316",
        "penstock logs --role worker -n 100",
        "penstock logs --pretty --trace 4bf92f35",
    ),
    "penstock jobs result": ("penstock jobs result job_0074d316",),
    "penstock jobs events": (
        "penstock jobs events job_0074d316",
        "penstock jobs events job_0074d316 --after 1:131:fd1fa10b0c19-1 --json",
    ),
    "penstock jobs watch": ("penstock jobs watch job_0074d316", "penstock jobs watch job_0074d316 --json"),
    "penstock jobs timing": ("penstock jobs timing job_0074d316",),
    "penstock jobs cancel": ("penstock jobs cancel job_0074d316",),
    "penstock batch": ("penstock batch run input.jsonl -o out.jsonl", "penstock batch ls"),
    "penstock batch run": (
        "penstock batch run input.jsonl -o out.jsonl",
        "penstock batch run rows.csv -o out.jsonl --template '{text}' --id-column id",
        "penstock batch run notes/ -o out.jsonl --window 1h --max-tokens 64",
    ),
    "penstock batch ls": ("penstock batch ls", "penstock batch ls --limit 100 --json"),
    "penstock batch show": ("penstock batch show batch_00c69952",),
    "penstock batch output": ("penstock batch output batch_00c69952 > out.jsonl",),
    "penstock batch errors": ("penstock batch errors batch_00c69952",),
    "penstock batch cancel": ("penstock batch cancel batch_00c69952",),
    "penstock batch pause": ("penstock batch pause batch_00c69952",),
    "penstock batch resume": ("penstock batch resume batch_00c69952",),
    "penstock dlq": ("penstock dlq ls", "penstock dlq show 0-1795486176000-0"),
    "penstock dlq ls": ("penstock dlq ls", "penstock dlq ls --limit 100 --json"),
    "penstock dlq show": ("penstock dlq show 0-1795486176000-0",),
    "penstock dlq replay": ("penstock dlq replay 0-1795486176000-0",),
    "penstock dlq drop": ("penstock dlq drop 0-1795486176000-0",),
    "penstock webhooks": ("penstock webhooks ls", "penstock webhooks show msg_003f9a1c"),
    "penstock webhooks ls": ("penstock webhooks ls", "penstock webhooks ls --json"),
    "penstock webhooks show": ("penstock webhooks show msg_003f9a1c",),
    "penstock webhooks replay": ("penstock webhooks replay msg_003f9a1c",),
    "penstock tenants": ("penstock tenants", "penstock tenants research --json"),
    "penstock scale": ("penstock scale status", "penstock scale set sim 3 --for 10m", "penstock scale resume sim"),
    "penstock scale status": ("penstock scale status", "penstock scale status --json"),
    "penstock scale log": ("penstock scale log",),
    "penstock scale set": ("penstock scale set sim 3", "penstock scale set sim 3 --for 10m"),
    "penstock scale pause": ("penstock scale pause sim --for 2h",),
    "penstock scale resume": ("penstock scale resume sim",),
    "penstock store": ("penstock store show", "penstock store reset"),
    "penstock store show": ("penstock store show", "penstock store show --redis-url redis://127.0.0.1:6379/0"),
    "penstock store adopt": ("penstock store adopt", "penstock store adopt --yes"),
    "penstock store reset": ("penstock store reset", "penstock store reset --yes"),
    "penstock store acl": ("penstock store acl > users.acl",),
    "penstock plan": (
        "penstock plan memory --model llama-3.1-8b --gpu h200",
        "penstock plan cost --model llama-3.1-8b --gpu l4 --gpu h200",
    ),
    "penstock plan memory": (
        "penstock plan memory --model opt-13b --gpu a100-80gb --in 512 --out 256",
        "penstock plan memory --model llama-3.1-70b --gpu h200 --tp 2 --kv-bits 8",
        "penstock plan memory --config my-model/config.json --gpu l40s",
    ),
    "penstock plan roofline": (
        "penstock plan roofline --model mixtral-8x7b --gpu h200 --batch 32",
        "penstock plan roofline --model llama-3.1-8b --gpu l4 --w-bits 4",
    ),
    "penstock plan cost": (
        "penstock plan cost --model llama-3.1-8b --gpu l4 --gpu h200",
        "penstock plan cost --model opt-13b --gpu h200 --price h200=3.80",
    ),
    "penstock plan search": (
        "penstock plan search --model llama-3.1-70b --gpu h200 --gpus 8 --price 3.80",
        "penstock plan search --model llama-3.1-8b --gpu l4 --rate 1",
    ),
    "penstock plan grid": ("penstock plan grid --model mixtral-8x7b --gpu h100 --gpus 8",),
    "penstock plan goodput": ("penstock plan goodput --model opt-13b --gpu a100-80gb --gpus 2",),
    "penstock plan place": ("penstock plan place --load opt-1.3b=20 --load opt-13b=2 --gpu h200 --gpus 2",),
    "penstock plan what-if": (
        "penstock plan what-if --model llama-3.1-8b --gpu l4 --rate 4",
        "penstock plan what-if --model opt-13b --gpu h200 --other-gpu b200",
    ),
    "penstock plan simulate": (
        "penstock plan simulate --model opt-13b --gpu h200 --rate 4",
        "penstock plan simulate --model opt-13b --gpu h200 --trace burstgpt.csv",
        "penstock plan simulate --model opt-13b --gpu l4 --trace .penstock/records",
    ),
    "penstock plan fit": (
        "penstock plan fit --since 1h",
        "penstock plan fit --records .penstock/records --scale 2",
    ),
    "penstock tune": (
        "penstock tune frontier --requests 60",
        "penstock tune goodput",
    ),
    "penstock tune frontier": (
        "penstock tune frontier --requests 60",
        "penstock tune frontier --workload mine.csv",
        "penstock tune frontier --apply",
    ),
    "penstock tune goodput": ("penstock tune goodput --ttft-ms 500",),
    "penstock bench": ("penstock bench table1 --quick", "penstock bench gateway --help"),
    "penstock bench gateway": ("penstock bench gateway --quick", "penstock bench gateway --base main"),
    "penstock bench table1": (
        "penstock bench table1 --quick",
        "penstock bench table1 --base-url http://127.0.0.1:8000/v1 --c 1,8,64",
        "penstock bench table1 --base-url http://127.0.0.1:8000/v1 --rate 4 --seconds 30",
    ),
    "penstock bench jobs": ("penstock bench jobs --rounds 1 --seconds 2",),
    "penstock bench gpu": ("penstock bench gpu --quick",),
    "penstock bench order": ("penstock bench order --part gate --quick",),
    "penstock bench elastic": ("penstock bench elastic --short",),
    "penstock bench recovery": ("penstock bench recovery --quick",),
    "penstock bench conformance": ("penstock bench conformance --suite ~/suites/durable-streams",),
    "penstock bench chaos": ("penstock bench chaos --list", "penstock bench chaos --rows F01 --short"),
    "penstock probe": ("penstock probe api", "penstock probe worker --id worker-1 --alive"),
    "penstock doctor": ("penstock doctor", "penstock doctor --verbose", "penstock doctor --json"),
    "penstock completion": (
        'eval "$(penstock completion bash)"    # in ~/.bashrc',
        'eval "$(penstock completion zsh)"     # in ~/.zshrc, after compinit',
        "penstock completion fish > ~/.config/fish/completions/penstock.fish",
    ),
    "penstock version": ("penstock version", "penstock version --json"),
    "penstock help": ("penstock help up", "penstock help jobs ls", "penstock help environment"),
}
"""By the whole name of the command."""
