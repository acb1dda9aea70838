"""Many workers as one: which of them a group of samples goes to."""
