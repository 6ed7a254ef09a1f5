"""What `ssmax serve` does under load: new tokens a second by the number of clients at a time.

    python benchmarks/serve_speed.py URL MODEL

against a server that runs already, with OpenAI's client. Every request has a prompt of 256 tokens
and asks for 64 more, greedily; a client sends the next as soon as it has its answer.
"""

import argparse
import asyncio
import random
import time

import openai

PROMPT, NEW, REQUESTS = 256, 64, 64
CLIENTS = (1, 4, 16, 64)


async def measure(client: openai.AsyncOpenAI, model: str, clients: int) -> tuple[float, float]:
    """New tokens a second of all, and the mean seconds of an answer."""
    rng = random.Random(clients)
    prompts = [[rng.randrange(256) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    seconds, new = [], []

    async def work() -> None:
        while prompts:
            prompt, started = prompts.pop(), time.monotonic()
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=NEW, temperature=0
            )
            seconds.append(time.monotonic() - started)
            new.append(answer.usage.completion_tokens)

    started = time.monotonic()
    await asyncio.gather(*(work() for _ in range(clients)))
    return sum(new) / (time.monotonic() - started), sum(seconds) / len(seconds)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--api-key", default="none")
    typed = parser.parse_args()
    async with openai.AsyncOpenAI(base_url=typed.url, api_key=typed.api_key) as client:
        await measure(client, typed.model, 4)
        print(f"{'clients':>8} {'new tokens/s':>13} {'seconds an answer':>18}")
        for clients in CLIENTS:
            speed, wait = await measure(client, typed.model, clients)
            print(f"{clients:>8} {speed:>13,.0f} {wait:>18.2f}")


if __name__ == "__main__":
    asyncio.run(main())
