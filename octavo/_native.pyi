"""Native kernels; see csrc/kernels.h. Tensors are passed by address (`data_ptr()`); 0 means none.

Functions with keyword-only parameters are kernels. A `Plan` can record them, except those that pack
weights. The packing functions and `philox_uniforms` raise RuntimeError while a plan records.
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
    """Index of the continuations of token sequences; see csrc/suffix_automaton.h."""

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Return the number of tokens plus one for each sequence."""

    @property
    def nbytes(self) -> int: ...
    def add(self, tokens: int, count: int, /) -> None:
        """Add a sequence: int32 [count], without negative numbers."""

    def match(self, tokens: int, count: int, most: int, /) -> tuple[int, list[int]]:
        """Find the longest suffix of `tokens` (int32 [count]) that a known sequence continues.

        Returns:
            The length of the suffix, and up to `most` tokens that followed it.
        """

class Plan:
    """Recorded list of kernel calls; see csrc/plan.h."""

    def __init__(self) -> None: ...
    def begin(self) -> None:
        """Start to record the kernel calls of the calling thread instead of running them."""

    def end(self) -> None:
        """Stop recording."""

    def bind(self, rows: str, /) -> None:
        """Set the dimension of `StepSize` that counts the rows of the next recorded calls."""

    def run(self, tokens: int, requests: int, samples: int, /) -> None:
        """Run the recorded calls for a step of the given size, except those without rows."""

    def __len__(self) -> int: ...

def record_call(function: Callable[[int, int], object], /) -> None:
    """Add a call of `function(tokens, requests)` to the plan that records on this thread.

    Raises:
        RuntimeError: no plan records.
    """

class StepProgress:
    """Number of layers of a step with keys and values in the cache; see csrc/progress.h."""

    def __init__(self) -> None: ...
    def reset(self) -> None:
        """Start another step."""

    def reach(self, layers: int, /) -> None:
        """Report that `layers` layers are done; while a plan records, record this call."""

    def wait(self, layers: int, /) -> None:
        """Wait until `layers` layers are done."""

def share_rows(index: int, size: int, /) -> None:
    """Restrict the next recorded calls to every `size`-th row, from row `index` on.

    The rows are those that `bind` counts; (0, 1) means all. Without a recording plan this does
    nothing.
    """

def set_profiling(on: bool, /) -> None:
    """Enable or disable the recording of a span for each kernel call of the process."""

def take_spans() -> list[tuple[str, float, float, float, float, int]]:
    """Return (name, start, end, bytes, flops, rows) of each call since the last time.

    Times are those of `time.monotonic`.
    """

def tuning() -> tuple[bool, int, int]:
    """Return the values that `set_tuning` sets; see octavo/kernels/tuning.py.

    Returns:
        True if kernels fetch weights past the caches, the microseconds that an idle thread spins,
        and the number of vector operations that are worth sharing.
    """

def set_tuning(past_caches: bool, spin_us: int, grain: int, /) -> None:
    """Set the tuning; no kernel may run."""

def release_pages(address: int, nbytes: int, /) -> None: ...
def touch_pages(address: int, nbytes: int, /) -> None:
    """Have the system allocate the pages of mapped memory; their contents are kept."""

def read_memory(address: int, nbytes: int, locality: int, /) -> int:
    """Return the XOR of a buffer's 64-bit words, read by all threads; see csrc/read_memory.h."""

def chunk_sum(data: int, nbytes: int, seed: int, /) -> int:
    """Return a checksum of the bytes at an address; never 0."""

def save_pages(
    *, from_: int, to: int, sums: int, seeds: int, pages: int, chunks: int, chunk_nbytes: int
) -> None:
    """Copy pages on this thread, and write a checksum for each chunk; see csrc/kv_pages.h.

    Args:
        from_: addresses of the sources: uint64 [pages].
        to: addresses of the copies: uint64 [pages].
        sums: addresses of the checksums of each page: uint64 [pages], each of uint64 [chunks].
        seeds: uint64 [pages].
        pages: number of pages.
        chunks: number of chunks in a page.
        chunk_nbytes: bytes of a chunk, a multiple of 8.
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
    """Copy pages back; set bad, uint8 [pages], to 1 where a checksum does not match."""

class GroupError(RuntimeError):
    """Error raised when a process of a group fails or does not reach a barrier in time."""

def shared_barrier(*, barrier: int, ranks: int, timeout: float) -> None:
    """Wait at a barrier for the other processes, at most `timeout` seconds; see csrc/barrier.h."""

def break_group(barrier: int, /) -> None:
    """End all present and future waiting at a barrier."""

def group_broken(barrier: int, /) -> bool: ...
def counter_post(counter: int, value: int, /) -> None:
    """Set a 32-bit counter in shared memory; see csrc/barrier.h."""

def counter_reached(counter: int, value: int, /) -> bool: ...
def counter_wait(*, counter: int, value: int, barrier: int, timeout: float) -> None:
    """Wait until a counter reaches a value or the barrier's group breaks; `timeout` in seconds."""

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
