"""Parsing of answers: splits what a model writes into reasoning, content and tool calls.

Guarantees, for any text:

- Parsing never raises. Time and memory are at most proportional to the length of the text: only a limited number of
  malformed regions is parsed again.
- The parts that a stream returns do not depend on how the text is divided. Joined, they are the parsed whole.
- A tool call is returned only if the request has tools, and if the call's region is well-formed and closed. The end of
  the answer closes a region in formats without a closing marker.
- Other text is reasoning or content, as written, with these exceptions: white space around calls and reasoning, the
  markers of a section with calls and the text between its beginning and its first call, and the beginning of a call
  in an answer that was cut off.
- Where a marker, such as `<tool_call>`, is a token of its own, only this token is the marker. The same text in other
  tokens is plain text.
"""
