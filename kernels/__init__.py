"""The numeric operations of a decoder. `contract` states what the operations promise; `reference` defines each one.

`specs` and `layer` define what a decoder computes with these operations. `families` lists the supported decoders,
`selection` chooses the backend that computes the operations, and `training` is the trainer's side.
"""
