"""The numeric operations of a decoder. `contract` states the guarantees of the operations; `reference` defines each
operation.

`specs` and `layer` define what a decoder computes with these operations. `families` lists the supported decoders,
`selection` chooses the backend that computes the operations, and `training` is the trainer's side.
"""
