"""`outpace distill`, stage text: prompts, also of the target's own, the writer, and what is kept of what it writes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from distill_files import prompts_file, run_command, settings, target_folder
from distill_files import target as target
from files import set_fields

from outpace.core.errors import UserError
from outpace.distill import prompts, text
from outpace.distill import text as writing
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.options import TEMPERATURES
from outpace.distill.prompts import is_held_out, read_prompts
from outpace.distill.shards import TextFolder, read_shard, read_shards
from outpace.distill.text import load_target, write_text
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer, engine_answers, loop_answers
from outpace.models.base import Model, chain
from outpace.models.files.cache import exclusive_lock
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.cuda.writing_loop import WritingLoop
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.llama.torch.runtime import Llama
from outpace.models.text.tokenizer import Tokenizer


@pytest.fixture
def write(target: Path, tmp_path: Path) -> Callable[..., TextFolder]:
    """Write until there are `tokens`, from a file of `count` prompts, to the folder `text`."""

    def run(
        count: int, tokens: int, progress: Callable[[dict[str, float]], None] = lambda figures: None, **changes: Any
    ) -> TextFolder:
        asked = [str(prompts_file(tmp_path / f"{count}.jsonl", count))]
        writer = WriterOptions(rows=6, max_tokens=10, top=4)
        return write_text(
            target, settings(target, tmp_path, prompts=asked, tokens=tokens, writer=writer, **changes), None, progress
        )

    return run


def test_a_run_continues_with_the_remaining_prompts(write: Callable[..., TextFolder]) -> None:
    first = write(40, 60)
    before = {file: (first.folder / file).stat().st_mtime_ns for file in first.shards}
    second = write(40, 300)
    assert second.tokens >= 300
    assert len(second.shards) == len(first.shards) + 1
    assert all((first.folder / file).stat().st_mtime_ns == time for file, time in before.items())
    numbers = [number for shard in read_shards(first.folder) for number in shard.jobs.tolist()]
    assert len(numbers) == len(set(numbers))


def test_every_prompt_is_answered_at_every_temperature(write: Callable[..., TextFolder]) -> None:
    found: dict[bytes, list[float]] = {}
    for shard in read_shards(write(4, 400).folder):
        for n, length in enumerate(shard.prompts.tolist()):
            text = shard.tokens[shard.starts[n] : shard.starts[n] + length].tobytes()
            found.setdefault(text, []).append(float(shard.temperatures[n]))
    for temperatures in found.values():
        assert np.allclose(np.unique(temperatures), TEMPERATURES)


def test_a_torn_shard_is_dropped_and_reported(write: Callable[..., TextFolder]) -> None:
    store = write(40, 60)
    (name,) = store.shards
    file = store.folder / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="is not a whole shard"):
        read_shard(file)
    reports: list[dict[str, float]] = []
    assert write(40, 60, reports.append).tokens >= 60
    assert reports[0] == {"dropped": 1}


def test_an_interrupted_run_keeps_finished_answers(write: Callable[..., TextFolder], tmp_path: Path) -> None:
    def interrupt(figures: dict[str, float]) -> None:
        if figures["tokens"] > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(40, 5000, interrupt)
    assert sum(len(shard.top_ids) for shard in read_shards(tmp_path / "text")) > 50


def test_a_full_disk_leaves_the_finished_shards(
    write: Callable[..., TextFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(40, 60)

    def full(tensors: dict[str, np.ndarray], file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*1 finished shards stay good"):
        write(40, 200)
    monkeypatch.undo()
    assert TextFolder(first.folder, {}).tokens == first.tokens
    assert not list(first.folder.glob(".*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"turns": ["Hello"]}\n{"turns": ["Hel', "line 2 is not JSON.*the file seems torn"),
        (b'{"turns": ["Hello"]}\n{"prompt": "Hi"}\n', "line 2 must be a JSON object"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prompts.collect([str(file)])


def test_a_hub_data_set_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="hub:someone/some needs `pip install datasets`"):
        prompts.collect(["hub:someone/some"])


def test_the_built_in_prompts() -> None:
    texts = prompts.collect([prompts.BUILT_IN])
    assert len(texts) > 3000
    assert texts == prompts.collect([prompts.BUILT_IN])
    assert all(len(text.strip()) > 4 for text in texts)
    assert not [text for text in texts if "{" in text.replace("{1:", "").replace("{'a'", "")]
    share = sum(map(is_held_out, texts)) / len(texts)
    assert 0.01 < share < 0.03


def test_held_out_answers_are_not_trained_on(write: Callable[..., TextFolder], target: Path, tmp_path: Path) -> None:
    train, held_out = read_samples(write(150, 1200).folder, 64)
    tokenizer = Tokenizer.from_folder(target)
    texts = {text for text in prompts.collect([str(tmp_path / "150.jsonl")]) if is_held_out(text)}
    encoded = {tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in texts}
    assert {tuple(sample.tokens[: sample.prompt].tolist()) for sample in held_out} <= encoded
    assert not {tuple(sample.tokens[: sample.prompt].tolist()) for sample in train} & encoded
    assert held_out
    ids = frequent_tokens(train, 272, 60, always=[2])
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == 60
    assert 2 in ids.tolist()
    written = np.concatenate([sample.tokens[sample.prompt :] for sample in train])
    assert np.isin(written, ids.numpy()).mean() > 0.5


TENSORS = reference.random_tensors(reference.TINY)
TARGET = Llama.from_tensors(reference.TINY, TENSORS.__getitem__)
JOBS = [AnswerJob(5000 + n, tuple(range(1 + n, 4 + 2 * n)), (0.0, 0.8, 1.0)[n % 3]) for n in range(9)]
STOP = frozenset({7})


def written_by(rows: int, model: Model = TARGET) -> dict[int, WrittenAnswer]:
    answers = engine_answers(model, STOP, WriterOptions(rows=rows, max_tokens=12, top=4), iter(JOBS))
    return {answer.job.number: answer for answer in answers}


def write_by_loop(rows: int, model: Model) -> dict[int, WrittenAnswer]:
    assert isinstance(model, GraphLlama)
    loop = WritingLoop(model, rows, max(len(job.prompt) for job in JOBS) + 12, 4)
    answers = loop_answers(loop, STOP, WriterOptions(max_tokens=12, top=4), iter(JOBS))
    return {answer.job.number: answer for answer in answers}


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_a_loop_on_the_device_writes_the_engines_answers(rows: int) -> None:
    """As a GPU does it, by the stand-in for its graphs."""
    model = GraphLlama.from_tensors(reference.TINY, TENSORS.__getitem__, is_eager=True, exact=False)
    expected, found = written_by(4), write_by_loop(rows, model)
    assert sorted(found) == sorted(expected)
    assert any(len(answer.tokens) < 12 for answer in found.values())
    for number, answer in expected.items():
        assert np.array_equal(answer.tokens, found[number].tokens)
        assert np.array_equal(answer.top_ids, found[number].top_ids)
        assert np.allclose(answer.top_log_p, found[number].top_log_p, atol=5e-3)


def log_p(answer: WrittenAnswer) -> torch.Tensor:
    """The target's log-probabilities before every token of an answer: [tokens, vocab]"""
    tokens = [*answer.job.prompt, *answer.tokens.tolist()]
    start = len(answer.job.prompt)
    session = TARGET.open(len(tokens), len(tokens))
    scores = TARGET.score([chain(session, tokens[:-1], range(start - 1, len(tokens) - 1))])
    return torch.log_softmax(scores, -1)


def test_an_answer_depends_on_its_job_alone() -> None:
    together, alone = written_by(4), written_by(1)
    assert sorted(together) == [job.number for job in JOBS]
    for number, answer in alone.items():
        assert np.array_equal(answer.tokens, together[number].tokens)
        assert np.array_equal(answer.top_ids, together[number].top_ids)
        assert len(answer.tokens) == 12 or answer.tokens[-1] == 7
    assert len({answer.tokens.tobytes() for answer in alone.values()}) > 3


def test_what_the_target_thought() -> None:
    for answer in written_by(3).values():
        best, ids = log_p(answer).topk(4)
        assert np.array_equal(answer.top_ids, ids.numpy())
        assert np.allclose(answer.top_log_p, best.numpy(), atol=5e-3), "float16 rounds to 2^-11"
        if answer.job.temperature == 0.0:
            assert np.array_equal(answer.tokens, ids[:, 0].numpy())


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_without_exact_mode_it_stays_near(dtype: torch.dtype, distance: float) -> None:
    model = Llama.from_tensors(reference.TINY, TENSORS.__getitem__, dtype=dtype, exact=False)
    found = written_by(5, model).values()
    near = [log_p(a).gather(1, torch.from_numpy(a.top_ids).long()) - torch.from_numpy(a.top_log_p) for a in found]
    assert float(torch.cat(near).abs().mean()) < distance


def test_a_target_of_a_shape_that_the_kernels_refuse_runs_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target_folder(tmp_path / "target")
    opened: list[str] = []
    whole = text.load_model

    def noted(*given: object, **options: object) -> object:
        opened.append(str(options["runtime"]))
        if options["runtime"] == "native":
            raise UnsupportedShape("head_dim is 7")
        return whole(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(text, "load_model", noted)
    model = load_target(folder, "cpu")
    assert isinstance(model, Llama)
    assert not model.exact, "training text needs no exact mode"
    assert opened == ["native", "llama"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "model_type 'gemma'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    other = target_folder(tmp_path / "other", **changes)
    with Checkpoint.open(other) as checkpoint, pytest.raises(UserError, match=named):
        checkpoint.read_config()


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("max_tokens", 0), ("top", 0), ("seed", -1)])
def test_a_wrong_option_is_named(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}"):
        WriterOptions(**{name: value})


SMALL = WriterOptions(rows=8, max_tokens=12, top=4)


def write_messages(target: Path, number: int, folder: Path) -> list[str]:
    said: list[float] = []
    file = writing.write_prompts(
        target, number, folder, SMALL, "cpu", lambda stage, figures: said.append(figures["prompts"])
    )
    assert said == sorted(said)
    return read_prompts(file)


class ScriptedWriter:
    """A writer with given answers, which records its jobs."""

    def __init__(self, texts: list[str], target: Path) -> None:
        self._texts, self._tokenizer, self.jobs = texts, Tokenizer.from_folder(target), list[AnswerJob]()

    def __call__(self, *arguments: Any) -> Iterator[WrittenAnswer]:
        jobs: Iterator[AnswerJob] = arguments[-1]
        end = min(self._tokenizer.stop_ids)
        for message, job in zip(self._texts, jobs, strict=False):
            self.jobs.append(job)
            is_cut = message.startswith("CUT")
            ids = [*self._tokenizer.continuation(message), *([] if is_cut else [end])]
            top = np.zeros((len(ids), 1))
            yield WrittenAnswer(job, np.array(ids), top, top)


def test_whole_messages_are_kept_once_each(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["hello world hello", "hello", "CUT hello world or well", "hello world hello", "well well or all he"]
    writer = ScriptedWriter(told, target)
    monkeypatch.setattr(writing, "write_answers", writer)
    kept = [told[0], told[4]]
    assert write_messages(target, 2, tmp_path) == kept
    assert {job.temperature for job in writer.jobs} == {writing.TEMPERATURE}

    assert write_messages(target, 2, tmp_path) == kept, "it has enough"
    more = ScriptedWriter([told[0], "12 worlds or 12 hells"], target)
    monkeypatch.setattr(writing, "write_answers", more)
    assert write_messages(target, 3, tmp_path) == [*kept, "12 worlds or 12 hells"], "old prompts are not written again"
    assert not {job.number for job in more.jobs} & {job.number for job in writer.jobs}


def test_the_same_seed_writes_the_same(tmp_path: Path) -> None:
    """The shipped model's: whole messages of its own."""
    try:
        model = resolve(None)
    except UserError:
        pytest.skip("the shipped model is not installed")
    found = [write_messages(model, 3, tmp_path / name) for name in ("one", "two")]
    assert found[0] == found[1]
    assert all(len(text) >= writing.MIN_CHARACTERS for text in found[0])
    assert len(set(found[0])) == 3


def test_a_target_without_messages_or_a_template_is_an_error(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MAX_TRIES", 5)
    monkeypatch.setattr(writing, "write_answers", ScriptedWriter(["CUT hello world or well"] * 20, target))
    with pytest.raises(UserError, match="of 5 messages that the target began, 0 ended as a user's message does"):
        write_messages(target, 2, tmp_path)
    bare = target_folder(tmp_path / "bare")
    set_fields(bare, chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        write_messages(bare, 2, tmp_path)


def test_prompts_begin_with_each_begin_in_rotation(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ScriptedWriter([" world or well he", " well or all or he"] * 2, target)
    monkeypatch.setattr(writing, "write_answers", writer)
    given = (SMALL, "cpu", lambda *_: None, ("hello", "lo"))
    found = read_prompts(writing.write_prompts(target, 2, tmp_path, *given))
    assert found == ["hello world or well he", "lo well or all or he"]
    tokenizer = Tokenizer.from_folder(target)
    heads = [tokenizer.decode(job.prompt) for job in writer.jobs[:2]]
    assert heads[0].endswith("hello")
    assert heads[1].endswith("lo")


def test_two_processes_at_the_same_prompts(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused before it reads what is there, for the first goes on writing."""
    monkeypatch.setattr(writing, "write_answers", ScriptedWriter(["hello world or well"] * 3, target))
    command = ["--target", target, "--out", tmp_path, "--write-prompts", 1]
    with exclusive_lock(tmp_path / "prompts.jsonl"):
        assert run_command(*command) == 2
        assert "another process is writing prompts in" in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "prompts.jsonl").exists()
    assert run_command(*command) == 0
    assert len(read_prompts(tmp_path / "prompts.jsonl")) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--write-prompts", "0"], "write_prompts is 0"),
        (["--write-prompts", "3", "--evaluate", "x"], "exclude one another"),
        (["--begin", "Write", "--tokens", "9"], "--begin is for --write-prompts"),
    ],
)
def test_bad_input_is_an_error(
    arguments: list[str], says: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--target", target, "--out", tmp_path / "out", *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())
