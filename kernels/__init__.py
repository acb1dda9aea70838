"""The numeric operations of a decoder, each exact against itself. `ops` holds the contract, `reference` defines each op."""
