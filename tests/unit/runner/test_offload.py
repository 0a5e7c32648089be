"""What the mover asks of a disk that is behind."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from octavo.contracts import BlockId, BlockSave, BlockTraffic, Medium
from octavo.runner.offload import BlockMover


class StuckDisk:
    """Takes nothing, and notes how long each writer was ready to wait."""

    def __init__(self) -> None:
        self.patience_s: list[float] = []

    def write(self, name: object, content: bytes, patience_s: float) -> bool:
        self.patience_s.append(patience_s)
        return False

    def done(self) -> list[object]:
        return []


class Model:
    def read_blocks(self, group: int, blocks: Any) -> Any:
        return np.zeros((len(blocks), 8), np.uint8)


def moved(*, patient: bool) -> tuple[StuckDisk, int]:
    """The disk, and how many of 100 blocks are reported as not saved."""
    disk = StuckDisk()
    mover = BlockMover(cast("Any", Model()), cast("Any", disk))
    saves = tuple(BlockSave(0, BlockId(number), bytes([number]), Medium.DISK) for number in range(100))
    mover.move(BlockTraffic(saves=saves, patient=patient), ())
    report = mover.report(waits=False)
    assert report is not None
    return disk, len(report.unsaved)


def test_a_step_never_waits_for_a_disk_that_is_behind() -> None:
    disk, num_unsaved = moved(patient=False)
    assert disk.patience_s == [0.0] * 100
    assert num_unsaved == 100


def test_a_disk_that_is_stuck_is_waited_for_once() -> None:
    disk, num_unsaved = moved(patient=True)
    assert disk.patience_s[0] > 0
    assert disk.patience_s[1:] == [0.0] * 99
    assert num_unsaved == 100
