"""`torch.distributed.checkpoint` on files of ours.

DCP plans: which rank writes which part of which tensor, and which parts a rank of another layout has to read. Its own files are
pickles, whose reading runs what is in them; these are safetensors and a JSON manifest.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_over_ranks
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from halfstep.checkpoint.disk import sync_folder, writing
from halfstep.checkpoint.manifest import Chunk, File, Manifest, Stored, write_manifest
from halfstep.checkpoint.tensor_file import DTYPES, NAMES, Written, bytes_of, read_tensor, write_tensors
from halfstep.errors import UsageError

Buffers = dict[MetadataIndex, torch.Tensor]
"""Copies on the host of this rank's parts, kept from one checkpoint to the next."""
PARTIAL = ".partial"
"""At the end of the name of a checkpoint that is being written."""


class Staged(DefaultSavePlanner):
    """This rank's part of a state, copied to the host when it is made: training may go on as soon as that is done.

    Args:
        tensors: by name; plain ones are this rank's to write, sharded ones those of all ranks.
        buffers: where the copies go; those that do not fit are made anew.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        super().set_up_planner(dict(tensors))
        self._plan = super().create_local_plan()
        self._copies = {
            item.index: _copy(super(Staged, self).resolve_data(item), buffers.get(item.index)) for item in self._plan.items
        }
        buffers.clear()
        buffers.update(self._copies)
        self.state_dict = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """The state is here already."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """The parts that were copied."""
        self.plan = self._plan
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The copy of a part."""
        return self._copies[write_item.index]


def _copy(tensor: torch.Tensor | io.BytesIO, buffer: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # one thread: torch's copy waits for threads that another program may keep from running (17 times slower then)
        bytes_of(buffer)[:] = bytes_of(tensor)
        return buffer
    return buffer.copy_(tensor.detach())


class Writer(StorageWriter):
    """Writes a checkpoint beside its place: a file of each rank, then the manifest; then it takes its place.

    Args:
        folder: the checkpoint's place.
        rank: this rank.
        ranks: how many there are.
        update: updates that were made before.
    """

    def __init__(self, folder: Path, *, rank: int, ranks: int, update: int) -> None:
        self._folder, self._beside = folder, folder.with_name(folder.name + PARTIAL)
        self._rank, self._ranks, self._update = rank, ranks, update

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer is made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        with writing(self._folder):
            self._beside.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        tensors = [(item.index.fqn, planner.resolve_data(item)) for item in plan.items]
        name = f"rank-{self._rank:05d}.safetensors"
        with writing(self._folder):
            written = write_tensors(self._beside / name, tensors)  # type: ignore[arg-type]  # nothing is written as bytes
        results = [
            WriteResult(index=item.index, size_in_bytes=tensor.nbytes, storage_data=(name, begin, list(tensor.shape), written))  # type: ignore[union-attr]
            for item, (_, tensor), begin in zip(plan.items, tensors, written.begins, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and put the checkpoint in its place."""
        manifest = self._manifest(metadata, [one for of_rank in results for one in of_rank])
        with writing(self._folder):
            for name in manifest.files:
                if not (self._beside / name).is_file():
                    raise UsageError(
                        f"{self._folder} cannot be written: {name}, which another rank has written, is not there. All hosts must "
                        "see the same folder."
                    )
            write_manifest(self._beside, manifest)
            sync_folder(self._beside)
            set_aside(self._folder)
            os.replace(self._beside, self._folder)
            sync_folder(self._folder.parent)

    def _manifest(self, metadata: Metadata, results: Sequence[WriteResult]) -> Manifest:
        files: dict[str, File] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in results:
            name, begin, shape, written = result.storage_data
            assert isinstance(written, Written)
            files[name] = File(size=written.size, crc32=written.crc32)
            offsets = list(result.index.offset or [0] * len(shape))
            chunks.setdefault(result.index.fqn, []).append(Chunk(file=name, begin=begin, offsets=offsets, shape=shape))
        tensors = {
            name: Stored(dtype=NAMES[found.properties.dtype], shape=list(found.size), chunks=chunks[name])
            for name, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        return Manifest(update=self._update, ranks=self._ranks, files=files, tensors=tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def set_aside(folder: Path) -> None:
    """Remove a checkpoint in such a way that half of it is never taken for one."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    shutil.rmtree(old, ignore_errors=True)


def save(staged: Staged, writer: Writer, process_group: Any | None) -> None:
    """Write a checkpoint; every rank calls it. `process_group` is None where there is one rank.

    Raises:
        UsageError: some rank could not write.
    """
    if process_group is not None:
        try:
            save_over_ranks({}, storage_writer=writer, planner=staged, process_group=process_group)
        except CheckpointException as error:
            raise min(error.failures.items())[1][0] from None
        return
    writer.set_up_storage_writer(True)
    [plan], metadata = staged.create_global_plan([staged.create_local_plan()])
    writer.finish(metadata, [writer.write_data(plan, staged).wait()])


def load(folder: Path, manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
    """Read tensors of a checkpoint into those of the same names, whatever the layout they were written in."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(manifest, targets))
    places = {(name, tuple(chunk.offsets)): chunk for name in targets for chunk in manifest.tensors[name].chunks}
    with ExitStack() as opened:
        files = {name: opened.enter_context((folder / name).open("rb")) for name in manifest.files}
        for item in planner.create_local_plan().items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            chunk = places[name, offsets or (0,) * len(manifest.tensors[name].shape)]
            tensor = read_tensor(files[chunk.file], chunk.begin, chunk.shape, DTYPES[manifest.tensors[name].dtype])
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(tensor)


def _metadata(manifest: Manifest, names: Mapping[str, object]) -> Metadata:
    """The part of the manifest that is to be read, as DCP knows it."""
    found: dict[str, Any] = {}
    for name in names:
        stored = manifest.tensors[name]
        found[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[stored.dtype]),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape)) for chunk in stored.chunks
            ],
        )
    return Metadata(state_dict_metadata=found)
