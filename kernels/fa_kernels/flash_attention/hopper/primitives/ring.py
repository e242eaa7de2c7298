"""Ring buffers in shared memory: some warps fill the places of a ring one by one, and other warps read the places.

The kernels call the index of a place `stage`. A fill writes one place. Fills have numbers, which count from 0 over all
work items of a program. Each warp counts the fills itself. Warps tell each other only that a place is full or empty.
Fill i writes place i % PLACES. In a ring with 2 places:

    fill            0   1   2   3   4   5
    place           0   1   0   1   0   1
    phase           0   0   1   1   0   0

An mbarrier has a phase, 0 or 1. A new mbarrier is in phase 0. When all expected arrivals have come, the phase ends and
the other phase begins. mbarrier.wait(b, phase) returns when the last phase that has ended is `phase`. A reader of fill
4 therefore waits for phase 0 of `full`. The writer of fill 4 waits until fill 2 has been read. Reading fill 2 ends
phase 1 of `empty`. Fill 4 itself has phase 0, so its writer waits for the other phase, `phase ^ 1`. The writer of fill
0 or 1 does not wait, because a new mbarrier behaves as if phase 1 had ended.

The functions `wait_full` and `wait_empty` take the number of a fill. The methods of `Ring` take a place and its phase,
for callers that need the place too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives.barriers import hand_back
from fa_kernels.flash_attention.structure import structure


@structure
class Ring:
    """A ring buffer. Each place has two mbarriers.

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

        phase: the phase that `place_of` returns for the fill that will write the place.
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
    """Waits until fill `number` of a ring buffer is complete. If `pred` is false, the function does not wait.

    `full` holds one mbarrier for each place of the ring.
    """
    PLACES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(number % PLACES), (number // PLACES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, number):
    """Waits until fill `number` can begin: all readers have read the previous data in the same place."""
    PLACES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(number % PLACES), (number // PLACES) & 1 ^ 1)


@gluon.jit
def place_of(number, PLACES: gl.constexpr):
    """Returns the place that fill `number` writes, and the phase of the place's mbarriers."""
    return number % PLACES, (number // PLACES) & 1
