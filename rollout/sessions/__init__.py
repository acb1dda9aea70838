"""Sessions of agents. In a session, the tokens of an answer are always the tokens that the model drew."""
