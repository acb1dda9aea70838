"""The numeric operations of a decoder: `contract` says what they promise, `reference` defines each of them.

`specs` and `layer` say what a decoder computes with them, `families` which decoders there are, `selection` who computes
them, and `training` is the trainer's side.
"""
