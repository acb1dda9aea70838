"""Parsing of answers: splits what a model writes into reasoning, content and tool calls.

Guarantees, for any text:

- Parsing takes time and memory proportional to the length of the text, and never raises.
- The parts that a stream returns do not depend on how the text is divided. Joined, they are the parsed whole.
- A tool call is returned only if its region is closed and well-formed. All other text is reasoning or content, as
  written.
- Where a marker, such as `<tool_call>`, is a token of its own, only this token is the marker. The same text in other
  tokens is plain text.
"""
