"""Parsing of answers: splits what a model writes into reasoning, content and tool calls.

Guarantees, for any text:

- Parsing never raises. A region is a part of the text that holds tool calls. Parsing takes time and memory at most
  proportional to the length of the text, because the text after malformed regions is parsed again only a limited number
  of times.
- The result of a stream does not depend on how the text is divided into pieces: all parts that the stream returns,
  joined, equal the result for the whole text.
- A tool call is returned only if the request has tools, and if the region of the text that holds the call is
  well-formed and closed. In formats without a closing marker, the end of the answer closes the region.
- All other text is returned unchanged, as reasoning or content, except for these parts, which are dropped: white space
  around calls and reasoning; the markers that begin and end a section of calls, and the text between the section's
  beginning and its first call; and an incomplete call at the end of an answer that was cut off.
- If the tokenizer has a token for a marker, such as `<tool_call>`, only this token is the marker. If the model writes a
  marker's text with other tokens, the text is plain text. The parsers therefore work on marked text, in which a single
  character stands for each marker that is a token (`markers`).
"""
