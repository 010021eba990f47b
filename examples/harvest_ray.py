"""A harvest over Ray Data: each worker makes its parts of one data set, and nothing has to be merged.

    pip install ray 'patchclamp[harvest]'
    python examples/harvest_ray.py fake documents.txt activations --site "resid_post[1]" --workers 2

Workers on several machines need one folder that all of them see; or copy the folders of the same name together.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import ray.data


class Worker:
    """Loads the model once, and makes the shares that it is given."""

    def __init__(self, model: str, engine: str | None) -> None:
        import patchclamp as pc

        self.lm = pc.LM(model, engine=engine)

    def __call__(self, batch: dict[str, Any], documents: str, folder: str, sites: list[str], of: int) -> dict[str, Any]:
        import patchclamp as pc

        made = [pc.studies.harvest(self.lm, documents, folder, sites=sites, shard=(int(i), of)) for i in batch["shard"]]
        return {"folder": [one.folder for one in made], "tokens": [one.ran for one in made]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("documents")
    parser.add_argument("folder")
    parser.add_argument("--site", action="append", required=True)
    parser.add_argument("--engine")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    args = parser.parse_args()
    shares = ray.data.from_items([{"shard": i} for i in range(args.workers)], override_num_blocks=args.workers)
    done = shares.map_batches(
        Worker, batch_size=1, num_gpus=args.gpus, compute=ray.data.ActorPoolStrategy(size=args.workers),
        fn_constructor_args=(args.model, args.engine),
        fn_kwargs={"documents": args.documents, "folder": args.folder, "sites": args.site, "of": args.workers},
    ).take_all()  # fmt: skip
    for share in done:
        print(f"{share['folder']}: {share['tokens']} tokens run")

    import patchclamp as pc

    data = pc.studies.Harvested(done[0]["folder"])
    data.write_statistics()  # each worker knew only its own shards
    print(f"{len(data)} rows in {len(data.shards)} shards, {len(data.missing)} missing")


if __name__ == "__main__":
    main()
