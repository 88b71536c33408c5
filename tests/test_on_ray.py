"""The arguments of outpace on Ray, without a cluster; `make test-ray` runs it on one."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny

from outpace.api.llm import LLM
from outpace.cluster.on_ray import place_draft_worker, read_resources
from outpace.core.errors import UserError
from outpace.core.options import help_of
from outpace.engine.options import BuildOptions
from outpace.models.options import LoadOptions
from outpace.server.on_ray import Placement, build, read_arguments

needs_no_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")


def test_texts_are_converted() -> None:
    given = {"target": "M", "draft": "auto", "batch": "4", "exact": "true", "kv_memory": "1.5", "width": "3"}
    given |= {"replicas": "2", "num_gpus": "0.5", "max_queue": "7", "allow_method": "card,planned", "insecure": "true"}
    loading, options, placement = read_arguments(given)
    assert loading == {"target": "M", "draft": "auto", "batch": 4, "exact": True, "kv_memory": 1.5, "width": "3"}
    assert (options.limits.max_queue, options.allow_method, options.insecure) == (7, ["card", "planned"], True)
    assert placement == Placement(2, 1.0, 0.5)


def test_other_values_are_kept() -> None:
    loading, options, placement = read_arguments({"batch": 4, "allow_method": ["card"], "replicas": 3})
    assert (loading, options.allow_method, placement.replicas) == ({"batch": 4}, ["card"], 3)


def test_rules_that_requests_may_choose_are_loaded() -> None:
    loading, options, _ = read_arguments({"allow_method": "judge,card", "judge": "J"})
    assert (loading, options.allow_method) == ({"judge": "J", "rules": ("judge",)}, ["judge", "card"])


def test_defaults_are_those_of_serve() -> None:
    loading, options, placement = read_arguments({})
    assert (loading, options.limits.drain, placement) == ({}, 30.0, Placement(1, 1.0, 0.0))


def test_every_argument_of_the_library_has_a_type() -> None:
    parameters = inspect.signature(LLM).parameters
    for name in ("target", "draft", *help_of(LoadOptions), *help_of(BuildOptions)):
        if name != "rules":  # those of allow_method
            assert read_arguments({name: parameters[name].default}) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": "none"}, "replicas is 'none': input should be a valid integer"),
        ({"replicas": "0"}, "replicas is 0, it must be a whole number, at least 1|replicas is 0"),
        ({"num_gpus": "-1"}, "num_gpus is -1"),
        ({"targte": "M"}, "did you mean 'target'"),
        ({"port": "80"}, "leave out port: Ray's proxy"),
        ({"progress": "x"}, "no argument is called 'progress'"),
        ({"max_queue": "0"}, "max_queue is 0"),
        ({"allow_method": "cart"}, "cart"),
        ({"allow_host": 5}, "allow_host is 5, it must be a text"),
        ({"batch": None}, "batch is None, it must be a whole number"),
        ({5: 6}, "no argument is called 5"),
        ({"api_key_file": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_wrong_arguments_give_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_arguments(given)


def test_a_bench_takes_the_address_of_a_draft_worker(run: Run) -> None:
    code, _, err = run("bench", "--worker", "ray", "--methods", "card")
    assert (code, "--worker is 'ray', a bench takes the address" in err) == (2, True), err


def test_resources_are_read() -> None:
    assert read_resources("ray") == {}
    assert read_resources("ray:num_gpus=1,phone=0.5") == {"num_gpus": 1.0, "phone": 0.5}


@pytest.mark.parametrize("text", ["ray:num_gpus", "ray:=1", "ray:num_cpus=-1", "ray:num_cpus=nan", "ray:a=b"])
def test_wrong_resources_give_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="it must be ray, or ray:NAME=AMOUNT"):
        read_resources(text)


@needs_no_ray
def test_without_ray_the_extra_is_named(run: Run) -> None:
    for call in (lambda: build({}), place_draft_worker):
        with pytest.raises(UserError, match="needs the extra ray"):
            call()
    code, _, err = run("generate", "--worker", "ray", "hello")
    assert (code, "needs the extra ray" in err) == (2, True), err
    code, _, err = run("generate", "--worker", "ray:num_gpus", "hello")
    assert (code, "--worker is 'ray:num_gpus'" in err) == (2, True), err
