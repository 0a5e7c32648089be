"""An executor without arithmetic that notices every mistake of a scheduler: its tokens depend on all that attention would read.

The KV content of a position is a number made from its token, its position and the content of every position it attends to,
found through the block tables. A wrong block, a stale cache hit, a missed or doubled write changes that number, hence the
tokens, or is caught as an assertion. `alone` computes the same without blocks, as if each request ran alone. `Harness`
drives a real scheduler with it, step by step.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.config import SchedulerConfig
from octavo.contracts import (
    NULL_BLOCK,
    BlockContent,
    BlockCopy,
    BlockSave,
    BlockTraffic,
    DiskFile,
    DiskSpace,
    EngineInput,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    KVGroup,
    KVLayout,
    Medium,
    RequestId,
    Retention,
    RowPlan,
    RowResult,
    SlotStart,
    StepMasks,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
    TokenSampling,
    TrafficReport,
)
from octavo.engine import DEFAULT_LEAST_PART, Scheduler
from octavo.errors import EngineError

VOCABULARY = 97
FORCES = "forces"


def layout(*num_blocks: int, block_size: int = 4, window: int | None = None) -> KVLayout:
    """One full group, and with two numbers of blocks a second group with a sliding window (or full, without `window`)."""
    groups = [KVGroup(layers=(0,), bytes_per_token=8)]
    if len(num_blocks) == 2:
        retention = Retention.FULL if window is None else Retention.WINDOW
        groups.append(KVGroup(layers=(1,), retention=retention, window=window, bytes_per_token=8))
    return KVLayout(block_size=block_size, groups=tuple(groups), num_blocks=num_blocks)


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> GenerateRequest:
    """A request; `fields` are those of TokenSampling and GenerateRequest."""
    outer = {key: fields.pop(key) for key in GenerateRequest.__struct_fields__ if key in fields}
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=TokenSampling(max_tokens=max_tokens, **fields),  # type: ignore[arg-type]
        **outer,  # type: ignore[arg-type]
    )


def _content(token: int, position: int, windows: Sequence[array[int]]) -> int:
    """Content of a position, from its token and what it attends to in each group (in ascending position)."""
    value = zlib.crc32(b"%d %d" % (token, position))
    for number, read in enumerate(windows):
        value = zlib.crc32(read.tobytes(), value + number)
    return value


def _first_read(group: KVGroup, position: int) -> int:
    return 0 if group.window is None else max(0, position - group.window + 1)


def _logprobs(token: int, content: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=(token,), logprobs=(-(content % 1009) / 128,), rank=1 + content % 7)


def _token(content: int) -> int:
    return content % VOCABULARY


def forced_after(spec: GenerateRequest, token: int) -> tuple[int, ...]:
    """What the grammar FORCES leaves no choice of after a token. It changes no tokens else."""
    if spec.grammar != FORCES or spec.sampling.logprobs is not None:
        return ()
    return tuple((7 * token + place) % VOCABULARY for place in range(token % 6))


@dataclass
class Answer:
    """What a request's events add up to."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    num_cached_tokens: int | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, f"{event.request_id}: an event after the terminal one"
        first = self.num_cached_tokens is None
        assert (event.num_cached_tokens is not None) == first, "cached tokens come with the first event, once"
        assert first or event.prompt_logprobs is None, "prompt logprobs come with the first event"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        if first:
            self.num_cached_tokens = event.num_cached_tokens
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.stop_token = event.stop_token
        self.error_code = event.error_code
        self.error_message = event.error_message

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that must not depend on what else runs."""
        return (self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason, self.stop_token)


def alone(spec: GenerateRequest, groups: Sequence[KVGroup], max_model_len: int) -> Answer:
    """The answer of a request that runs alone, computed without blocks, steps or a scheduler."""
    tokens, sampling = list(spec.prompt_token_ids), spec.sampling
    contents = array("Q")
    answer = Answer()
    while True:
        while len(contents) < len(tokens):
            position = len(contents)
            reads = [contents[_first_read(group, position) :] for group in groups]
            contents.append(_content(tokens[position], position, reads))
        if sampling.prompt_logprobs is not None and answer.prompt_logprobs is None:
            scored = [_logprobs(tokens[position + 1], contents[position]) for position in range(len(tokens) - 1)]
            answer.prompt_logprobs = (None, *scored)
        if len(answer.token_ids) >= sampling.max_tokens:
            answer.finish_reason = FinishReason.LENGTH
            return answer
        sampled = _token(contents[-1])
        if sampling.logprobs is not None:
            answer.logprobs += (_logprobs(sampled, contents[-1]),)
        for token in (sampled, *forced_after(spec, sampled)):
            may_stop = len(answer.token_ids) >= sampling.min_tokens
            tokens.append(token)
            answer.token_ids += (token,)
            if may_stop and not sampling.ignore_eos and token in sampling.eos_token_ids:
                answer.finish_reason = FinishReason.STOP
            elif may_stop and token in sampling.stop_token_ids:
                answer.finish_reason, answer.stop_token = FinishReason.STOP, token
            elif len(answer.token_ids) >= sampling.max_tokens or len(tokens) >= max_model_len:
                answer.finish_reason = FinishReason.LENGTH
            if answer.finish_reason is not None:
                return answer


@dataclass
class _Row:
    start: SlotStart
    tokens: list[int]
    tables: list[list[int]]
    freed: list[int]
    taken: list[set[int]]
    """Blocks of its tables, by group, that others have written since it was computed last."""
    computed: int | None = None


@dataclass
class Faults:
    """What shall go wrong, by number of the call of `submit` (from 1)."""

    submit_before: set[int] = field(default_factory=set)
    """Raise before anything of the plan is applied."""
    submit_after: set[int] = field(default_factory=set)
    """Raise after slots and tables changed."""
    sample: set[int] = field(default_factory=set)
    rows: set[RequestId] = field(default_factory=set)
    """These requests' rows fail with an error of their own when they sample."""


Content = dict[int, tuple[int, int]]
"""What a block holds: by offset, (position, content)."""


@dataclass
class FakeDisk:
    """Files that outlive an executor."""

    files: dict[BlockContent | str, Content] = field(default_factory=dict)
    damaged: set[BlockContent] = field(default_factory=set)
    fetch_steps: int = 1
    """Steps that a fetch takes beside others."""
    max_writes: int = 1000
    """Files written between two reports; the rest is not saved."""


class FakeExecutor:
    """`contracts.Executor` that checks every rule of a plan. `num_computed` counts positions computed in all."""

    def __init__(
        self,
        layout: KVLayout,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        faults: Faults | None = None,
        disk: FakeDisk | None = None,
    ) -> None:
        self.layout = layout
        self.faults = faults or Faults()
        self.plans: list[StepPlan] = []
        self.num_computed = 0
        self.closed = 0
        self.disk = FakeDisk() if disk is None else disk
        self.num_loaded = 0
        self._outside: dict[BlockContent, Content] = {}
        self._fetching: list[tuple[int, BlockContent]] = []
        self._saved: list[BlockContent] = []
        self._unsaved: list[BlockContent] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slots: dict[int, _Row] = {}
        self._memory: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in layout.groups]
        self._unknown_slots: set[int] = set()

    @property
    def bound_slots(self) -> set[int]:
        return set(self._slots)

    def request_of(self, slot: int) -> RequestId:
        return self._slots[slot].start.request_id

    def submit(self, plan: StepPlan) -> FakeExecutor:
        self.plans.append(plan)
        if len(self.plans) in self.faults.submit_before:
            self._unknown_slots |= _slots_of(plan)
            raise RuntimeError("out of memory in submit")
        self._apply(plan)
        if len(self.plans) in self.faults.submit_after:
            self._unknown_slots |= _slots_of(plan)
            raise RuntimeError("out of memory in submit")
        return self

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        plan = self.plans[-1]
        results = tuple(self._compute(row) for row in plan.rows)
        for again in range(1, plan.repeat):
            if any(self._ended(result) for result in results):
                break
            rows = [msgspec.structs.replace(row, start=row.start + again) for row in plan.rows]
            results = tuple(map(_followed_by, results, map(self._compute, rows)))
        if len(self.plans) in self.faults.sample:
            self._unknown_slots |= _slots_of(plan)
            raise RuntimeError("out of memory in sample")
        return StepResult(step=plan.step, rows=results, traffic=self._report(waits=not plan.rows))

    def _ended(self, result: RowResult) -> bool:
        sampling = self._slots[result.slot].start.sampling
        ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        return result.error is not None or result.token_ids[-1] in ends

    def close(self) -> None:
        self.closed += 1

    # --- applying and checking a plan ---------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        assert plan.rows or self._fetching or (plan.traffic is not None), "an empty step"
        assert len(plan.rows) <= self._max_num_seqs
        assert plan.num_tokens == sum(row.count for row in plan.rows) <= self._max_num_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows for a slot"
        assert plan.repeat == 1 or all(row.count == 1 and row.sample for row in plan.rows), (
            "a repeated row is no decode"
        )
        assert plan.repeat == 1 or plan.rows, "nothing is repeated"
        assert len(set(plan.releases)) == len(plan.releases), "a slot released twice"
        for slot in plan.releases:
            assert slot in self._slots or slot in self._unknown_slots, f"release of slot {slot}, which is free"
            self._slots.pop(slot, None)
        self._unknown_slots.clear()
        for start in plan.starts:
            assert 0 <= start.slot < self._max_num_seqs and start.slot not in self._slots, f"slot {start.slot} is taken"
            groups = len(self.layout.groups)
            self._slots[start.slot] = _Row(
                start, list(start.token_ids), [[] for _ in range(groups)], [0] * groups, [set() for _ in range(groups)]
            )
        traffic = plan.traffic or BlockTraffic()
        for save in traffic.saves:
            self._save(save)
        for copy in plan.copies:
            self._copy(copy)
        self._move(traffic)
        for row in plan.rows:
            self._grow(row, plan.repeat)
        self._check_writes(plan)

    def _save(self, save: BlockSave) -> None:
        name = BlockContent(save.group, save.key)
        memory, size = self._memory[save.group], self.layout.block_size
        content = {offset: memory[save.block, offset] for offset in range(size) if (save.block, offset) in memory}
        assert content, "a block is saved that was never written"
        if save.medium is Medium.MEMORY:
            assert name not in self._outside, "content is swapped out twice"
            self._outside[name] = content
        elif len(self._saved) + len(self._unsaved) < self.disk.max_writes:
            self.disk.files[name] = content
            self._saved.append(name)
        else:
            self._unsaved.append(name)

    def _move(self, traffic: BlockTraffic) -> None:
        for load in traffic.loads:
            content = self._outside[BlockContent(load.group, load.key)]
            for offset in range(self.layout.block_size):
                self._memory[load.group].pop((load.block, offset), None)
            self._memory[load.group].update({(load.block, offset): value for offset, value in content.items()})
            self.num_loaded += 1
        self._fetching += [(len(self.plans) + self.disk.fetch_steps, name) for name in traffic.fetches]
        for name in traffic.drops:
            self._outside.pop(name, None)
        for file in traffic.deletes:
            self.disk.files.pop(file, None)

    def _report(self, *, waits: bool) -> TrafficReport:
        due = [name for step, name in self._fetching if waits or step <= len(self.plans)]
        self._fetching = [(step, name) for step, name in self._fetching if name not in due]
        fetched = [name for name in due if name in self.disk.files and name not in self.disk.damaged]
        self._outside |= {name: self.disk.files[name] for name in fetched}
        report = TrafficReport(
            saved=tuple(self._saved),
            unsaved=tuple(self._unsaved),
            fetched=tuple(fetched),
            missing=tuple(name for name in due if name not in fetched),
        )
        self._saved, self._unsaved = [], []
        return report

    def _copy(self, copy: BlockCopy) -> None:
        memory = self._memory[copy.group]
        for block in (copy.source, copy.target):
            assert 0 <= block < self.layout.num_blocks[copy.group]
        for offset in range(self.layout.block_size):
            content = memory.get((copy.source, offset))
            if content is None:
                memory.pop((copy.target, offset), None)
            else:
                memory[copy.target, offset] = content

    def _grow(self, row: RowPlan, repeat: int) -> None:
        state = self._slots[row.slot]
        if row.kept_blocks is not None:
            assert state.computed is not None and row.kept_blocks * self.layout.block_size <= state.computed < row.start
            for table in state.tables:
                assert row.kept_blocks <= len(table)
                del table[row.kept_blocks :]
        elif state.computed is not None:
            assert row.start == state.computed or row.start > state.computed, "computed tokens are repeated"
            assert row.start == state.computed or state.computed % self.layout.block_size == 0, "tokens are skipped"
        state.tokens += row.forced
        assert 0 < row.count <= len(state.tokens) - row.start, "a row computes unknown tokens, or none"
        assert not row.sample or row.start + row.count == len(state.tokens), "a row samples before its last known token"
        end = row.start + row.count
        for number, (group, table) in enumerate(zip(self.layout.groups, state.tables, strict=True)):
            before = len(table)
            table.extend(row.new_blocks[number])
            needed = -(-(end + repeat - 1) // self.layout.block_size)
            # Where a repetition ended early, its blocks are there before they are needed.
            assert len(table) == max(before, needed), "a table is too short or longer than needed"
            freed = row.freed_blocks[number] if row.freed_blocks else 0
            assert freed >= state.freed[number], "a freed block came back"
            state.freed[number] = freed
            table[:freed] = [NULL_BLOCK] * freed
            assert not state.taken[number].intersection(table[freed:]), "a block is read that was given to another"
            state.taken[number].clear()
            for block in table[freed:]:
                assert 0 <= block < self.layout.num_blocks[number]
            assert len(set(table[freed:])) == len(table) - freed, "a block twice in one table"
            assert freed == _first_read(group, row.start) // self.layout.block_size, "wrong number of freed blocks"

    def _check_writes(self, plan: StepPlan) -> None:
        """What is written in this step is in no table of others in it: not shared, and not handed out before it is complete. Those that
        are not in this part of a step may still have it, if they give it up before they read."""
        slots = {row.slot for row in plan.rows}
        size = self.layout.block_size
        for number in range(len(self.layout.groups)):
            written: dict[int, int] = {}
            for row in plan.rows:
                table = self._slots[row.slot].tables[number]
                for block in table[row.start // size : (row.start + row.count + plan.repeat - 2) // size + 1]:
                    if block == NULL_BLOCK:
                        continue
                    assert block not in written, f"block {block} is written by two rows"
                    written[block] = row.slot
            for slot, state in self._slots.items():
                taken = {block for block in state.tables[number] if written.get(block, slot) != slot}
                assert not taken or slot not in slots, f"block {taken} is written while slot {slot} reads it"
                state.taken[number] |= taken

    def _compute(self, row: RowPlan) -> RowResult:
        state, sampling = self._slots[row.slot], self._slots[row.slot].start.sampling
        scores: list[TokenLogprobs] = []
        content = 0
        firsts = [_first_read(group, row.start) for group in self.layout.groups]
        reads = [
            array("Q", [self._read(number, state, position) for position in range(first, row.start)])
            for number, first in enumerate(firsts)
        ]
        for position in range(row.start, row.start + row.count):
            windows = [
                read[_first_read(group, position) - first :]
                for group, first, read in zip(self.layout.groups, firsts, reads, strict=True)
            ]
            content = _content(state.tokens[position], position, windows)
            for number, read in enumerate(reads):
                block, offset = self._place(number, state, position)
                self._memory[number][block, offset] = (position, content)
                read.append(content)
            self.num_computed += 1
            if position + 1 < state.start.num_prompt_tokens:
                scores.append(_logprobs(state.tokens[position + 1], content))
        state.computed = row.start + row.count
        prompt_logprobs = None if sampling.prompt_logprobs is None else tuple(scores)
        if not row.sample:
            return RowResult(slot=row.slot, prompt_logprobs=prompt_logprobs)
        if state.start.request_id in self.faults.rows:
            return RowResult(slot=row.slot, error="the logits hold NaN")
        token = _token(content)
        state.tokens.append(token)
        logprobs = None if sampling.logprobs is None else (_logprobs(token, content),)
        return RowResult(slot=row.slot, token_ids=(token,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _place(self, number: int, state: _Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.layout.block_size)
        block = state.tables[number][index]
        assert block != NULL_BLOCK, f"position {position} is needed but its block was freed"
        return block, offset

    def _read(self, number: int, state: _Row, position: int) -> int:
        written_position, content = self._memory[number][self._place(number, state, position)]
        assert written_position == position, f"position {position} finds the content of position {written_position}"
        return content


def _slots_of(plan: StepPlan) -> set[int]:
    """All that may have changed where a plan was applied in part; rows of those that start in it may come with a later part."""
    return {*(row.slot for row in plan.rows), *(start.slot for start in plan.starts), *plan.releases}


def _followed_by(one: RowResult, next_one: RowResult) -> RowResult:
    if next_one.error is not None:
        return next_one
    return msgspec.structs.replace(one, token_ids=(*one.token_ids, *next_one.token_ids))


class ScriptedInbox:
    """Gives out one batch of messages per call of `receive`; remembers how long each call would have blocked."""

    def __init__(self, *batches: Sequence[EngineInput]) -> None:
        self._batches = deque(batches)
        self.timeouts: list[float | None] = []

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        self.timeouts.append(timeout_s)
        while self._batches:
            batch = self._batches.popleft()
            if batch or timeout_s is not None:
                return batch
        assert timeout_s is not None, "the loop would block for ever"
        return ()


class BlockingInbox:
    """An inbox fed from another thread."""

    def __init__(self) -> None:
        self._messages: deque[EngineInput] = deque()
        self._ready = threading.Condition()
        self.num_receives = 0

    def put(self, message: EngineInput) -> None:
        with self._ready:
            self._messages.append(message)
            self._ready.notify()

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        with self._ready:
            self.num_receives += 1
            if not self._messages:
                self._ready.wait(timeout_s)
            messages = tuple(self._messages)
            self._messages.clear()
            return messages


class CollectingOutbox:
    """Keeps all outputs, and adds up the answer of each request."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.answers: dict[str, Answer] = {}

    def send(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        for event in output.events:
            self.answers.setdefault(event.request_id, Answer()).add(event)


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    """A scheduler and a fake executor, driven step by step, with all invariants checked after everything that happens."""

    def __init__(
        self,
        kv: KVLayout,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        max_pinned_tokens: int = 0,
        swap_blocks: int = 0,
        disk: FakeDisk | None = None,
        disk_blocks: int = 0,
        least_part: int | None = DEFAULT_LEAST_PART,
        namespace: bytes = b"model",
        faults: Faults | None = None,
        **scheduling: object,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            **scheduling,  # type: ignore[arg-type]
        )
        self.clock = Clock()
        self.layout = kv
        self.max_model_len = max_model_len
        self.disk = disk or FakeDisk()
        self.scheduler = Scheduler(
            kv,
            config,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            max_pinned_tokens=max_pinned_tokens,
            swap_bytes=swap_blocks * 8 * kv.block_size,
            disk=self._space(disk_blocks) if disk_blocks else None,
            least_part=least_part,
            namespace=namespace,
            clock=self.clock,
        )
        self.executor = FakeExecutor(kv, max_num_seqs, max_num_batched_tokens, faults, self.disk)
        self.outbox = CollectingOutbox()
        self.added: dict[str, GenerateRequest] = {}

    def _space(self, num_blocks: int) -> DiskSpace:
        size = 8 * self.layout.block_size
        files = tuple(DiskFile(str(file), file, size) for file in self.disk.files if isinstance(file, BlockContent))
        return DiskSpace(max_bytes=num_blocks * size, overhead_bytes=0, files=files)

    def add(self, *requests: GenerateRequest) -> None:
        for spec in requests:
            self.added[spec.request_id] = spec
            self.scheduler.add(spec)
            self.scheduler.check()

    def cancel(self, *names: str) -> None:
        self.scheduler.cancel([RequestId(name) for name in names])
        self.scheduler.check()

    def step(self, cancel_in_flight: Sequence[str] = ()) -> StepPlan | None:
        """One step; `cancel_in_flight` are cancelled after the plan was submitted. Returns the plan."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is not None:
            try:
                result = self.executor.submit(plan).sample()
                self.scheduler.verify(plan, result)
                result = msgspec.structs.replace(result, rows=tuple(map(self._with_forced, result.rows)))
            except (RuntimeError, EngineError) as error:
                self.cancel(*cancel_in_flight)
                output = self.scheduler.fail(plan, EngineError(str(error)))
            else:
                self.cancel(*cancel_in_flight)
                self.clock.now_s += 1.0
                output = self.scheduler.commit(plan, result, step_s=1.0)
            self.outbox.send(output)
            self.scheduler.check()
        elif (aside := self.scheduler.flush()) is not None:
            self.outbox.send(aside)
        return plan

    def _with_forced(self, row: RowResult) -> RowResult:
        if not row.token_ids:
            return row
        spec = self.added[self.executor.request_of(row.slot)]
        return msgspec.structs.replace(row, token_ids=(*row.token_ids, *forced_after(spec, row.token_ids[0])))

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, max_steps: int = 5000) -> list[StepPlan]:
        """Steps until nothing is left to do, then checks that nothing is held."""
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) <= max_steps, "the scheduler makes no progress"
        self.scheduler.check_idle()
        assert self.scheduler.kv_usage == 0.0 or any(self.scheduler._kv.pins.num_blocks)
        return plans

    def answer(self, name: str) -> Answer:
        return self.outbox.answers[name]

    def check_answers(self, *, except_for: Sequence[str] = ()) -> None:
        """Every added request ended once; all but `except_for` as if alone, those with a true beginning of that answer."""
        assert set(self.outbox.answers) == set(self.added)
        for name, spec in self.added.items():
            answer = self.answer(name)
            assert answer.finish_reason is not None, f"{name} did not end"
            expected = alone(spec, self.layout.groups, self.max_model_len)
            if name in except_for:
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)], name
            else:
                assert answer.content == expected.content, name
