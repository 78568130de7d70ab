"""Jobs at the same time: submit each, wait for all, and tell what failed."""

import asyncio

from penstock.client import ApiRefusal, AsyncPenstockClient, JobFailed

RIVERS = ("Rhine", "Danube", "Volga")


async def ask(client: AsyncPenstockClient, model: str, river: str) -> str:
    """The answer of one job, or what went wrong."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Where does the {river} end?"}],
        "max_tokens": 32,
        "queue": {"priority": "batch", "deadline_ms": 600_000},
        "metadata": {"river": river},
    }
    try:
        # Repeated with the same key, also by another process, this leads to the same job.
        job = await client.submit(body, idempotency_key=f"examples-{river}-1")
        job = await client.wait(job["id"])
    except ApiRefusal as refusal:  # it was not queued: status, code, and a message with the fix
        return f"refused: {refusal.status} {refusal.code}: {refusal}"
    except JobFailed as failure:  # it was queued, and ended without an answer
        return f"{failure.status}: {failure.code}: {failure}"
    return str(job["result"]["choices"][0]["message"]["content"])


async def main() -> None:
    """Print one line for each river."""
    async with AsyncPenstockClient() as client:
        models = await client.request("GET", "/v1/models", tries_again=True)
        model = models["data"][0]["id"]
        answers = await asyncio.gather(*(ask(client, model, river) for river in RIVERS))
    for river, answer in zip(RIVERS, answers, strict=True):
        print(f"{river}: {' '.join(answer.split())}")


asyncio.run(main())
