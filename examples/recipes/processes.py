"""Use clients in several processes and event loops. A client belongs to one process, and an async client to one event
loop.

`python examples/recipes/processes.py [MODEL]`. Pass the worker's address, a string, to other processes. Make each
client in the process that uses it.
"""

import asyncio
import multiprocessing
import sys

from torch.utils.data import DataLoader

from trueroll.rollout import (
    AsyncRolloutClient,
    RolloutClient,
    SamplingParams,
    TruerollError,
    derive_seed,
    launch_worker,
)

RUN_SEED = 1
prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
params = SamplingParams(n=2, max_tokens=8)
forks = multiprocessing.get_context("fork")  # the rules are the same with "spawn"; clients cannot be pickled


class Rollouts:
    """A dataset of samples. A process that reads an item generates the sample with the process's own client."""

    def __len__(self):
        return len(prompts)

    def __getitem__(self, index):
        # The seed depends only on the item, not on the process or on the other items that the process generates.
        [group] = client.generate([prompts[index]], params, seed=derive_seed(RUN_SEED, index))
        return [sample.token_ids for sample in group.samples]


def connect(*_):
    global client
    client = RolloutClient(worker.address)


def try_to_use(client):
    try:
        client.health()
    except TruerollError as error:
        print("in a forked process:", error, flush=True)


async def ask(client):
    return (await client.health()).state


with launch_worker(sys.argv[1] if len(sys.argv) > 1 else "smollm2", device="cpu") as worker:
    options = dict(collate_fn=list, multiprocessing_context=forks, worker_init_fn=connect)
    items = [item for [item] in DataLoader(Rollouts(), num_workers=2, **options)]
    connect()
    assert items == [Rollouts()[index] for index in range(len(prompts))]
    print(f"{len(items)} items from two processes with a client each: the same tokens as from one process")

    child = forks.Process(target=try_to_use, args=(client,))
    child.start()
    child.join()
    print("in the process that made it:", client.health().state)
    client.close()

    stays = AsyncRolloutClient(worker.address)
    with asyncio.Runner() as its_loop:
        print("in the loop of its first call:", its_loop.run(ask(stays)))
        try:
            asyncio.run(ask(stays))
            raise SystemExit("expected an error")
        except TruerollError as error:
            print("in another loop:", error)
        its_loop.run(stays.close())
