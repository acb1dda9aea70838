"""Deltas: folders that hold the changed bytes between two versions of the weights. trueroll writes slime's format, and
reads slime's and SkyRL's formats.

Owns: the format of these folders, the trainer's writer, and the worker's reader, which follows a chain of folders to a
version. Does not own: the push that commits the version (`weight_sync.trainer`, `weight_sync.worker`).

A chain is a folder, or a URL of an object store, with one folder for each version, such as `weight_v000123`. A folder
is a full checkpoint, or a delta to an earlier version: the changes from the earlier version to the folder's version. A
worker applies deltas to the version that it serves, or to a
full checkpoint, so a worker that is new or late needs no trainer to catch up.
"""
