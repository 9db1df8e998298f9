"""Native code in csrc/. Tensors are passed by address (`data_ptr()`); 0 means none."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

class Kernel(Protocol):
    """Function of a kernel. Its keywords are the members of its arguments (csrc/*_args.h).

    Addresses and codes are whole numbers. While a `Plan` records, a call is added to the plan
    instead of being run; kernels that pack weights raise RuntimeError then.
    """

    def __call__(self, **arguments: float) -> None: ...

class Kernels(Protocol):
    """The kernels that csrc/kernels.h lists."""

    def __getattr__(self, name: str, /) -> Kernel: ...

kernels: Kernels

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

class ExpertLayer:
    """The experts of one layer of an `ExpertCache`; it keeps the cache alive."""

    def experts(self, **arguments: float) -> None:
        """Compute as `kernels.experts`, with weights that the cache reads where needed."""

    def expect(self, *, ids: int, tokens: int, top_k: int) -> None:
        """Have the next call of another layer's `experts` fetch this layer's experts ahead.

        Args:
            ids: int32 [tokens, top_k]: guessed experts of each token, the most likely first.
            tokens: number of tokens.
            top_k: number of experts of each.
        """

class ExpertCache:
    """Weights of experts in a file, of which some are in memory; see csrc/expert_cache.h."""

    def __init__(self, *, memory: Tensor, slot_nbytes: int, slots: int, counts: int) -> None:
        """Use memory of `slots` experts, which stays alive; count in int64 [6]: `ExpertCount`."""

    def add_layer(self, *, begins: list[int], nbytes: int, down: int) -> ExpertLayer:
        """Add a layer.

        Args:
            begins: position in the file of each expert; -1: another rank has it.
            nbytes: bytes of an expert.
            down: position of the second weight in an expert.
        """

    def open(self, descriptor: int, sums: list[int], /) -> None:
        """Read from a file, whose descriptor the cache will close.

        `sums` has a checksum for each 2 MiB of each expert, in the order of the file.
        """

    def count_in(self, counts: int, /) -> None:
        """Count in other memory, int64 [6], from now on; no kernel may run."""

    def release(self) -> None:
        """Forget the weights in memory; no kernel may run."""

    def take_error(self) -> str:
        """Return what is wrong with the file, once after a failed read; else nothing."""

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

def shared_barrier(*, barrier: int, arrivals: int, ranks: int, timeout: float) -> None:
    """Wait at a barrier for the other processes, at most `timeout` seconds; see csrc/barrier.h.

    `arrivals` is a counter of this process's arrivals, or 0.
    """

def break_group(barrier: int, /) -> None:
    """End all present and future waiting at a barrier."""

def group_broken(barrier: int, /) -> bool: ...
def mend_group(barrier: int, /) -> None:
    """Make a broken barrier usable again, while no process waits at it."""

def counter_post(counter: int, value: int, /) -> None:
    """Set a 32-bit counter in shared memory; see csrc/barrier.h."""

def counter_value(counter: int, /) -> int: ...
def counter_reached(counter: int, value: int, /) -> bool: ...
def counter_wait(*, counter: int, value: int, barrier: int, timeout: float) -> None:
    """Wait until a counter reaches a value or the barrier's group breaks; `timeout` in seconds."""

def isa() -> str: ...
def panel() -> int: ...
def available_isas() -> list[str]: ...
def set_isa(name: str, /) -> None: ...
def set_num_threads(n: int, /) -> None: ...
def work_alone() -> None: ...
def num_threads() -> int: ...
def linear_scratch(rows: int, k: int, threads: int, /) -> int: ...
def philox_uniforms(seeds: int, positions: int, stream: int, count: int, out: int, /) -> None:
    """Draw random numbers; see csrc/philox.h. Raise RuntimeError while a plan records."""

class Tensor:
    """View of numbers in the host's memory: an address, a type, a shape and strides.

    Views share the memory and keep it. There is no arithmetic; `numpy` gives access to the numbers.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def T(self) -> Tensor:  # noqa: N802
        """View with the first two dimensions swapped."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a view; the index consists of integers, slices, None and ..."""

    def dim(self) -> int: ...
    def numel(self) -> int: ...
    def size(self, dim: int) -> int: ...
    def stride(self, dim: int) -> int: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...
    def view(self, *shape: Any) -> Tensor:
        """Return the same elements in another shape, or, given its name, as another type.

        Raises:
            ValueError: the view would need a copy.
        """

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> list[Tensor]: ...
    def unbind(self, dim: int = 0) -> list[Tensor]: ...
    def transpose(self, dim0: int, dim1: int) -> Tensor: ...
    def numpy(self) -> Any:
        """Return an array on the same memory.

        Raises:
            RuntimeError: a plan records: the numbers are not computed yet.
        """

    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def empty(*sizes: int, dtype: str) -> Tensor:
    """Return uninitialized numbers, aligned to a cache line."""

def zeros(*sizes: int, dtype: str) -> Tensor:
    """Return zeros, aligned to a cache line."""

def itemsize(dtype: str, /) -> int:
    """Return the bytes of a number of a type."""

def from_numpy(array: Any, /) -> Tensor:
    """Return a tensor on an array's memory. A read-only array gives a read-only tensor."""

def from_dlpack(tensor: Any, /) -> Tensor:
    """Return a tensor on the memory of another library's tensor, on the host."""
