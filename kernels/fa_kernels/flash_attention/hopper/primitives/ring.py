"""Ring buffers in shared memory: some warps fill the places of a ring one by one, and other warps read the places."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives.barriers import hand_back
from fa_kernels.flash_attention.structure import structure


@structure
class Ring:
    """A ring buffer that consists of equal parts, called places. Each place has two mbarriers.

    `buffers` has the shape [places, ...]. If the columns are split into blocks, `buffers` is a tuple with one buffer
    [places, ...] per column block.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # the place is filled
    empty: gl.shared_memory_descriptor  # all readers have read the data in the place

    @gluon.jit
    def wait_full(self, place, phase):
        """Waits until a place in the ring is filled."""
        mbarrier.wait(self.full.index(place), phase)

    @gluon.jit
    def wait_empty(self, place, phase):
        """Waits until a place can be filled. The first fill of a place does not wait.

        phase: the phase that `place_of` returns for the block of data that will be written to the place.
        """
        mbarrier.wait(self.empty.index(place), phase ^ 1)

    @gluon.jit
    def release(self, place):
        """Signals that this warpgroup has read a place in the ring."""
        hand_back(self.empty.index(place))


@gluon.jit
def new_barriers(PLACES: gl.constexpr):
    """Allocates one mbarrier for each place in a ring. The mbarriers are not initialised."""
    return gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def wait_full(full, number, pred=True):
    """Waits until the fill with index `number` of a ring buffer is complete.

    A fill writes one place of the ring. Fills are numbered from 0, and the fill with index i writes place i % PLACES.
    `full` holds one mbarrier for each place of the ring. If `pred` is false, the function does not wait.
    """
    PLACES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(number % PLACES), (number // PLACES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, number):
    """Waits until the fill with index `number` can begin.

    The fill can begin when all readers have read the previous data in the same place.
    """
    PLACES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(number % PLACES), (number // PLACES) & 1 ^ 1)


@gluon.jit
def place_of(number, PLACES: gl.constexpr):
    """Returns the place in a ring for the block of data with index `number`, and the phase of the place's mbarriers.

    Blocks of data are numbered from 0 in the order in which they are written to the ring.
    """
    return number % PLACES, (number // PLACES) & 1
