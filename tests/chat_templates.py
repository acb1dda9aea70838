"""Chat templates for tests of sessions, and tokenizers for them.

`TEMPLATES` are written for the tests in the manner of model families; none is a family's own template. `template_of`
also returns the templates of families that the package TRL contains.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "<pad>,<s>,</s>,<|im_start|>,<|im_end|>,<|endoftext|>,[gMASK],<sop>,<|system|>,<|user|>,<|assistant|>,"
    "<|observation|>,"
    "<|begin_of_text|>,<|start_header_id|>,<|end_header_id|>,<|eot_id|>,<|eom_id|>,<|im_user|>,<|im_assistant|>,"
    "<|im_system|>,<|im_middle|>,<|tool_calls_section_begin|>,<|tool_calls_section_end|>,<|tool_call_begin|>,"
    "<|tool_call_argument_begin|>,<|tool_call_end|>,<|start|>,<|message|>,<|end|>,<|channel|>,<|call|>,<|return|>,"
    "<end_of_turn>,<start_of_turn>,<|turn>,<turn|>,<|tool_response>"
).split(",")
MERGES = [("f", "a"), ("l", "s"), ("fa", "ls"), ("fals", "e"), ("t", "h"), ("Ċ", "Ċ"), ("Ġ", "th"), ("e", "r")]

_CALLS = (
    "{% for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_TOOLS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_SYSTEM = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You help.'"
    " }}\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
)
_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_PLAIN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

QWEN2_5 = (
    f"{_SYSTEM}{{% for message in messages %}}{{% if message.role == 'assistant' and message.tool_calls %}}"
    f"<|im_start|>assistant{{% if message.content %}}\n{{{{ message.content }}}}{{% endif %}}{_CALLS}<|im_end|>\n"
    f"{{% elif message.role == 'tool' %}}{_TOOLS}"
    f"{{% elif not (tools and loop.first and message.role == 'system') %}}{_PLAIN}{{% endif %}}{{% endfor %}}{_OPENS}"
)


def _thinking(keeps: str) -> str:
    """Return a template that writes the reasoning of a message if `keeps` is true."""
    return (
        f"{_LAST_QUERY}{_SYSTEM}{{% for message in messages %}}{{% if message.role == 'assistant' %}}"
        "<|im_start|>assistant\n"
        f"{{% if {keeps} and (loop.last or message.reasoning_content) %}}<think>\n"
        "{{ (message.reasoning_content or '').strip() }}\n</think>\n\n{% endif %}"
        f"{{{{ message.content.lstrip('\\n') }}}}{_CALLS}<|im_end|>\n"
        f"{{% elif message.role == 'tool' %}}{_TOOLS}"
        f"{{% elif not (tools and loop.first and message.role == 'system') %}}{_PLAIN}{{% endif %}}"
        f"{{% endfor %}}{_OPENS}"
    )


QWEN3 = _thinking("loop.index0 > ns.last")
NEMOTRON = _thinking(
    "(truncate_history_thinking is defined and not truncate_history_thinking or loop.index0 > ns.last)"
)
GLM = (
    f"[gMASK]<sop>{{% if tools %}}<|system|>\n{{% for tool in tools %}}{{{{ tool | tojson }}}}\n{{% endfor %}}"
    f"{{% endif %}}"
    f"{_LAST_QUERY}{{% for message in messages %}}"
    "{% if message.role == 'assistant' %}<|assistant|>"
    "{% if message.reasoning_content and (loop.index0 > ns.last or clear_thinking is defined and not clear_thinking)"
    " %}\n"
    "<think>{{ message.reasoning_content.strip() }}</think>{% else %}\n<think></think>{% endif %}"
    "{% if message.content.strip() %}\n{{ message.content.strip() }}{% endif %}"
    "{% for call in message.tool_calls %}\n<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}\n<arg_key>{{ key }}</arg_key>\n<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}<|{{ message.role }}|>\n{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KIMI = (
    "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|im_assistant|>assistant<|im_middle|>{{ message.content }}"
    "{% if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>"
    "{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>"
    "{% elif message.role == 'tool' %}"
    "<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}\n{{ message.content }}<|im_end|>"
    "{% else %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_FAMILIES = dict(qwen2_5=QWEN2_5, qwen3=QWEN3, nemotron=NEMOTRON, glm=GLM, kimi=KIMI)
TEMPLATES = {family: text.replace("%}\n", "%}{{ '\\n' }}") for family, text in _FAMILIES.items()}
"""The templates. Each line break after a block is an expression, because transformers removes line breaks there."""


def template_of(name: str) -> str:
    """Return a template of `TEMPLATES`, or a template of TRL by a name such as `trl/qwen3`."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    return (Path(trl.__file__).parent / "chat_templates" / f"{name.removeprefix('trl/')}.jinja").read_text()


def make_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return a byte-level tokenizer with a few merges and all special tokens."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def make_chat_folder(folder: Path, template: str, eos_token: str, model: Path | None = None) -> Path:
    """Make a folder with a tokenizer and a chat template, and with the weights of `model` if it is given."""
    if model is not None:
        shutil.copytree(model, folder)
    folder.mkdir(exist_ok=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), pad_token="<pad>", bos_token="<s>", eos_token=eos_token
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text()) if model else dict(model_type="llama")
    eos = tokenizer.convert_tokens_to_ids(eos_token)
    (folder / "config.json").write_text(json.dumps(config | dict(eos_token_id=eos)))
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=eos)))
    return folder
