"""Ring buffers in shared memory: some warps fill the places of a ring in turn, and others empty them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives.barriers import hand_back
from fa_kernels.flash_attention.hopper.primitives.structure import structure


@structure
class Ring:
    """A buffer [places, ...], or a tuple of buffers for the column blocks of a head, and two mbarriers per place."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # the place is filled
    empty: gl.shared_memory_descriptor  # all readers have read the place

    @gluon.jit
    def wait_full(self, place, phase):
        """Waits until the place is filled."""
        mbarrier.wait(self.full.index(place), phase)

    @gluon.jit
    def wait_empty(self, place, phase):
        """Waits until the place may be filled. The first fill does not wait. `phase` is the same as in `wait_full`."""
        mbarrier.wait(self.empty.index(place), phase ^ 1)

    @gluon.jit
    def release(self, place):
        """Signals that this warpgroup has read the place."""
        hand_back(self.empty.index(place))


@gluon.jit
def new_barriers(PLACES: gl.constexpr):
    """Allocates an mbarrier for each place, without initialising it."""
    return gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def wait_full(full, number, pred=True):
    """Waits until fill `number` of a ring is complete. Does not wait if `pred` is false.

    `full` holds the mbarriers of the ring's places.
    """
    PLACES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(number % PLACES), (number // PLACES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, number):
    """Waits until fill `number` of a ring may begin: all readers have read the place's previous fill."""
    PLACES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(number % PLACES), (number // PLACES) & 1 ^ 1)


@gluon.jit
def place_of(number, PLACES: gl.constexpr):
    """Returns the place of fill `number` of a ring, and the phase of that place's barriers."""
    return number % PLACES, (number // PLACES) & 1
