"""The native kernels; see csrc/kernels.h. Tensors are passed by address (`data_ptr()`); 0: none.

Functions of keywords only are kernels, and a `Plan` can record them, but for those that pack
weights: these and `philox_uniforms` raise RuntimeError while one records.
"""

from collections.abc import Callable

class StepArrays:
    def __init__(
        self, tokens: int, requests: int, samples: int, addresses: dict[str, int], /
    ) -> None: ...

class InputGatherer:
    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        groups: int,
        blocks: int,
        block_size: int,
        addresses: dict[str, int],
        /,
    ) -> None: ...
    def run(self, num_reqs: int, to: StepArrays, /) -> int: ...

class SuffixAutomaton:
    """Sequences of tokens, and how each run of tokens in them went on; see
    csrc/suffix_automaton.h."""

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Tokens, and one for each sequence."""

    @property
    def nbytes(self) -> int: ...
    def add(self, tokens: int, count: int, /) -> None:
        """Takes in a sequence: int32 [count], none negative."""

    def match(self, tokens: int, count: int, most: int, /) -> tuple[int, list[int]]:
        """How long the longest known run at the end of `tokens` (int32 [count]) is that went on,
        and up to `most` tokens that followed it."""

class Plan:
    """A list of recorded kernel calls; see csrc/plan.h."""

    def __init__(self) -> None: ...
    def begin(self) -> None:
        """Has the calling thread's kernel calls noted here, not carried out."""

    def end(self) -> None:
        """Ends `begin`."""

    def bind(self, rows: str, /) -> None:
        """Has the rows of calls from now on counted by that dimension of `StepSize`."""

    def run(self, tokens: int, requests: int, samples: int, /) -> None:
        """Carries the calls out for a step of that size; those of no rows are left out."""

    def __len__(self) -> int: ...

def record_call(function: Callable[[int, int], object], /) -> None:
    """Add a call of `function(tokens, requests)` to the plan that records on this thread.

    Raises:
        RuntimeError: no plan records.
    """

class StepProgress:
    """How many layers of a step have their keys and values in the cache; see csrc/progress.h."""

    def __init__(self) -> None: ...
    def reset(self) -> None:
        """Another step begins."""

    def reach(self, layers: int, /) -> None:
        """So many are there; while a plan records, whenever it comes here."""

    def wait(self, layers: int, /) -> None:
        """Returns once there are so many."""

def share_rows(index: int, size: int, /) -> None:
    """If a plan records: has calls from now on run for every `size`-th row of those that `bind`
    counts, from `index` on; (0, 1): for all."""

def set_profiling(on: bool, /) -> None:
    """Has every kernel call of the process noted."""

def take_spans() -> list[tuple[str, float, float, float, float, int]]:
    """(name, start, end, bytes, flops, rows) of the calls since last time; times as
    `time.monotonic`."""

def tuning() -> tuple[bool, int, int]:
    """Whether weights are fetched past the caches, microseconds that a thread waits awake, vector
    operations that are worth sharing; see octavo/kernels/tuning.py."""

def set_tuning(past_caches: bool, spin_us: int, grain: int, /) -> None:
    """Sets these while no kernel runs."""

def release_pages(address: int, nbytes: int, /) -> None: ...
def touch_pages(address: int, nbytes: int, /) -> None:
    """Has the system hand out the pages of mapped memory, which keep what they hold."""

def read_memory(address: int, nbytes: int, locality: int, /) -> int:
    """The exclusive or of the 64-bit numbers there, read by all threads; see csrc/read_memory.h."""

def chunk_sum(data: int, nbytes: int, seed: int, /) -> int:
    """A checksum of bytes at an address; never 0."""

def save_pages(
    *, from_: int, to: int, sums: int, seeds: int, pages: int, chunks: int, chunk_nbytes: int
) -> None:
    """Copies pages on this thread, and writes a sum for each of their chunks; see csrc/kv_pages.h.

    Args:
        from_: uint64 [pages], addresses.
        to: likewise.
        sums: likewise, of uint64 [chunks].
        seeds: uint64 [pages]
        pages: how many.
        chunks: in each of them.
        chunk_nbytes: a multiple of 8.
    """

def load_pages(
    *,
    from_: int,
    to: int,
    sums: int,
    seeds: int,
    pages: int,
    chunks: int,
    chunk_nbytes: int,
    bad: int,
) -> None:
    """Copies pages back; bad, uint8 [pages], is 1 where a sum is another one."""

class GroupError(RuntimeError):
    """A process of a group has failed, or did not come to a barrier in time."""

def shared_barrier(*, barrier: int, ranks: int, timeout: float) -> None:
    """Waits for the other processes; see csrc/barrier.h. Seconds."""

def break_group(barrier: int, /) -> None:
    """Ends all waiting at a barrier, now and later."""

def group_broken(barrier: int, /) -> bool: ...
def counter_post(counter: int, value: int, /) -> None:
    """Sets a counter in shared memory, a number of 32 bits; see csrc/barrier.h."""

def counter_reached(counter: int, value: int, /) -> bool: ...
def counter_wait(*, counter: int, value: int, barrier: int, timeout: float) -> None:
    """Waits until a counter has come to a value, unless the barrier's group breaks. Seconds."""

def isa() -> str: ...
def panel() -> int: ...
def available_isas() -> list[str]: ...
def set_isa(name: str, /) -> None: ...
def set_num_threads(n: int, /) -> None: ...
def num_threads() -> int: ...
def pack_weight(
    *,
    src: int,
    src_stride: int,
    dst: int,
    row0: int,
    rows: int,
    n: int,
    k: int,
    src_dtype: int,
    dtype: int,
) -> None: ...
def linear(
    *,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    out: int,
    out_stride: int,
    m: int,
    n: int,
    k: int,
    gated: int,
    dtype: int,
    out_dtype: int,
) -> None: ...
def linear_scratch(rows: int, k: int, threads: int, /) -> int: ...
def quantize_weight(
    *,
    src: int,
    src_stride: int,
    dst: int,
    row0: int,
    rows: int,
    n: int,
    k: int,
    group: int,
    format: int,
    dtype: int,
) -> None: ...
def pack_quant(
    *,
    codes: int,
    scales: int,
    zeros: int,
    dst: int,
    row0: int,
    rows: int,
    n: int,
    k: int,
    group: int,
    format: int,
) -> None: ...
def linear_q(
    *,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    out: int,
    out_stride: int,
    m: int,
    n: int,
    k: int,
    group: int,
    format: int,
    gated: int,
    dtype: int,
    out_dtype: int,
) -> None: ...
def rms_norm(
    *,
    x: int,
    x_stride: int,
    x_head_stride: int,
    residual: int,
    residual_out: int,
    residual_stride: int,
    weight: int,
    out: int,
    out_stride: int,
    out_head_stride: int,
    rows: int,
    heads: int,
    dim: int,
    eps: float,
    weight_offset: float,
    dtype: int,
) -> None: ...
def layer_norm(
    *,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    out: int,
    out_stride: int,
    rows: int,
    heads: int,
    dim: int,
    eps: float,
    dtype: int,
) -> None: ...
def gated(
    *,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    rows: int,
    dim: int,
    kind: int,
    dtype: int,
) -> None: ...
def unary(
    *,
    x: int,
    out: int,
    out_stride: int,
    rows: int,
    dim: int,
    param: float,
    kind: int,
    dtype: int,
) -> None: ...
def add(
    *,
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
    out: int,
    out_stride: int,
    rows: int,
    dim: int,
    dtype: int,
) -> None: ...
def sum_parts(
    *,
    x: int,
    x_stride: int,
    bias: int,
    out: int,
    out_stride: int,
    rows: int,
    parts: int,
    dim: int,
    dtype: int,
) -> None: ...
def gather(
    *,
    table: int,
    table_stride: int,
    n: int,
    ids: int,
    out: int,
    rows: int,
    dim: int,
    packed: bool,
    dtype: int,
) -> None: ...
def rotary(
    *,
    positions: int,
    query: int,
    query_stride: int,
    query_head_stride: int,
    query_heads: int,
    key: int,
    key_stride: int,
    key_head_stride: int,
    key_heads: int,
    cos_sin: int,
    tokens: int,
    rotary_dim: int,
    is_neox: bool,
    dtype: int,
) -> None: ...
def softmax(
    *,
    x: int,
    x_stride: int,
    out: int,
    rows: int,
    dim: int,
    log: bool,
) -> None: ...
def argmax(
    *,
    x: int,
    x_stride: int,
    out: int,
    rows: int,
    dim: int,
) -> None: ...
def row_max(
    *,
    x: int,
    x_stride: int,
    out: int,
    rows: int,
    dim: int,
) -> None: ...
def sample(
    *,
    x: int,
    x_stride: int,
    params: int,
    out: int,
    rows: int,
    dim: int,
) -> None: ...
def top_k(
    *,
    x: int,
    x_stride: int,
    values: int,
    indices: int,
    rows: int,
    dim: int,
    k: int,
) -> None: ...
def apply_bitmask(
    *,
    x: int,
    x_stride: int,
    x_rows: int,
    bitmask: int,
    bitmask_stride: int,
    indices: int,
    rows: int,
    dim: int,
) -> None: ...
def philox_uniforms(seeds: int, positions: int, stream: int, count: int, out: int, /) -> None: ...
def write_kv(
    *,
    key: int,
    key_stride: int,
    key_head_stride: int,
    value: int,
    value_stride: int,
    value_head_stride: int,
    kv_cache: int,
    kv_block_stride: int,
    slot_mapping: int,
    tokens: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: int,
    cache: int,
) -> None: ...
def attention(
    *,
    query: int,
    query_stride: int,
    query_head_stride: int,
    out: int,
    out_stride: int,
    out_head_stride: int,
    kv_cache: int,
    kv_block_stride: int,
    query_start_loc: int,
    seq_lens: int,
    block_table: int,
    block_table_stride: int,
    num_reqs: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    alibi_slopes: int,
    dtype: int,
    cache: int,
) -> None: ...
