"""A ring: places in shared memory that some warps fill and others empty, one after another."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives.barriers import hand_back
from fa_kernels.flash_attention.hopper.primitives.structure import structure


@structure
class Ring:
    """Buffers [places, ...], or a tuple of them for the columns of a head, and two mbarriers for each place.

    full: the place is filled; empty: its last readers are done with it.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def wait_full(self, place, phase):
        """Waits until the place is filled."""
        mbarrier.wait(self.full.index(place), phase)

    @gluon.jit
    def wait_empty(self, place, phase):
        """Waits until the place may be filled; does not wait in the first round. phase: that of `wait_full`."""
        mbarrier.wait(self.empty.index(place), phase ^ 1)

    @gluon.jit
    def release(self, place):
        """This warpgroup has read the place."""
        hand_back(self.empty.index(place))


@gluon.jit
def new_barriers(PLACES: gl.constexpr):
    """An mbarrier for each place, not initialised."""
    return gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def wait_full(full, number, pred=True):
    """Waits for fill `number` of a ring, if `pred`. full: the mbarriers of its places."""
    PLACES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(number % PLACES), (number // PLACES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, number):
    """Waits until fill `number` of a ring may begin: its readers are done with the fill before in that place."""
    PLACES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(number % PLACES), (number // PLACES) & 1 ^ 1)


@gluon.jit
def place_of(number, PLACES: gl.constexpr):
    """The place that fill `number` of a ring takes, and the phase of the place's barriers."""
    return number % PLACES, (number // PLACES) & 1
