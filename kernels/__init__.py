"""The numeric operations of a decoder: `ops` holds their contract, `reference` defines each of them."""
