"""Runs a draft worker as an actor on a Ray cluster: Ray chooses a machine with the resources, gRPC sends the tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from outpace.card.link import authenticator
from outpace.cluster.draft_server import open_draft_server
from outpace.core.arrays import num_cores, set_num_threads
from outpace.core.errors import UserError, require
from outpace.models.options import LoadOptions

_START_SECONDS = 300.0  # time for Ray to find a machine, and for the draft model to load
_actors: list[Any] = []  # Ray ends an actor that no variable refers to


class DraftActor:
    """Drafts on the machine that Ray chose, until the program that placed it ends."""

    def open(self, draft: str | None, options: LoadOptions, drafter: str, values: Mapping[str, Any], key: str) -> str:
        """Load the draft model and listen; return HOST:PORT."""
        import ray

        host = ray.util.get_node_ip_address()
        cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
        set_num_threads(min(max(int(cores), 1), num_cores()))
        keys = [sha256(key.encode()).digest()]
        self._server = open_draft_server(draft, options, drafter, values, authenticator(keys))
        return f"{host}:{self._server.listen(host, 0)}"


def read_resources(text: str) -> dict[str, float]:
    """Read the resources in a worker's name, as in "ray:num_gpus=1,num_cpus=2"; UserError for anything else."""
    found = {}
    for part in filter(None, text.removeprefix("ray").removeprefix(":").split(",")):
        name, _, amount = part.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = -1.0
        if not name or not 0.0 <= found[name] < float("inf"):
            raise UserError(f"--worker is {text!r}, it must be ray, or ray:NAME=AMOUNT,... as in ray:num_gpus=1")
    return found


def place_draft_worker(
    draft: str | None = None,
    options: LoadOptions | None = None,
    *,
    drafter: str = "model",
    values: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
) -> str:
    """Start a draft worker on the cluster; return its address for `load(worker=...)`, which contains an API key.

    `draft`: the draft model's hub id, folder or file on the chosen machine; None: the shipped one. `values`: options of
    the drafter. `resources`: num_cpus (also the number of threads), num_gpus, memory (bytes), and the cluster's own
    ones. The worker ends with this program. UserError if it cannot be placed or loaded.
    """
    require("a draft worker on Ray", "ray")
    require("a drafter on another machine", "remote", "grpc")
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    wanted: dict[str, float] = {"num_cpus": 1.0, **(resources or {})}
    usual = {name: wanted.pop(name) for name in ("num_cpus", "num_gpus", "memory") if name in wanted}
    actor = ray.remote(DraftActor).options(resources=wanted, **usual).remote()
    _actors.append(actor)
    key = secrets.token_urlsafe(24)
    try:
        where = ray.get(
            actor.open.remote(draft, options or LoadOptions(), drafter, dict(values or {}), key), timeout=_START_SECONDS
        )
    except ray.exceptions.GetTimeoutError:
        asked = ", ".join(f"{name}={amount:g}" for name, amount in [*usual.items(), *wanted.items()])
        raise UserError(
            f"no machine of the cluster started the draft worker in {_START_SECONDS:g} s ({asked})"
        ) from None
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, UserError) else error) from None
    return f"grpc://{key}@{where}"
