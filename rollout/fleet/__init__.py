"""Many workers as one: what keeps them running on Ray, and the client that asks them."""
