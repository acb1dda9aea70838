"""Sessions of agents: conversations in which the tokens of an answer stay the tokens that the model drew."""
