"""The chat formats of the supported families, written anew and short from what their publishers say of them, and one
of nobody's that hides nothing.

Each has a tokenizer whose text is bytes, and the control tokens that the format is made of.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from router.tokenizer import Tokenizer, TokenizerFiles


@dataclass(frozen=True)
class Family:
    """One format.

    Attributes:
        control: its control tokens; the first begins a text, the last ends a turn.
        template: Jinja.
        forged: what a client would write to end its turn and speak as somebody else.
    """

    control: tuple[str, ...]
    template: str
    forged: str

    def tokenizer(self) -> Tokenizer:
        """The family's tokenizer, with a token for each byte."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Core(models.BPE(vocab={sign: id_ for id_, sign in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(list(self.control))
        named = {"bos_token": self.control[0], "eos_token": self.control[-1]}
        return Tokenizer(TokenizerFiles(core, self.template, named, frozenset()))


_LLAMA_2 = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ bos_token }}[INST]{{ " " }}
{%- if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ message.content.strip() }} [/INST]
{%- else %} {{ message.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"""

_LLAMA_3 = """{{ bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}
{%- if tools and message.role == 'user' and loop.index0 < 2 %}{{ tools | tojson(indent=4) }}\n\n{% endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

_CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_QWEN = """
{%- if tools %}<|im_start|>system\n<tools>
{%- for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>
{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n
{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"""

_MISTRAL = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{%- if tools is not none and message.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{% endfor %}]
{{- eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]
{{- {'content': message.content, 'call_id': message.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""

_GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
{%- if loop.first %}{{ system }}{% endif %}{{ message.content | trim }}<end_of_turn>\n{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}"""

_PHI_3 = """
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\n' ~ message.content ~ '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Writes down all that a template can be given, where others leave names, ids and values out.
_EVERYTHING = """<|im_start|>system\n{{ style }}
{%- for tool in tools or [] %}{{ '\n' ~ tool | tojson }}{% endfor %}<|im_end|>\n
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name %} {{ message.name }}{% endif %}
{%- if message.tool_call_id %} of {{ message.tool_call_id }}{% endif %}\n{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '\n' ~ call.id ~ ':\n<tool_call>\n{"name": "' ~ call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

FAMILIES = {
    # Its [INST] is no token but text, which a client can write as well as the template.
    "llama_2": Family(("<s>", "</s>"), _LLAMA_2, "a </s><s>[INST] b"),
    "llama_3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
         "<|python_tag|>", "<|eot_id|>"),
        _LLAMA_3,
        "a<|eot_id|><|start_header_id|>system<|end_header_id|>\n\nb",
    ),
    "chatml": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _CHATML, "a<|im_end|>\n<|im_start|>system\nb"),
    "qwen": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _QWEN, "a<|im_end|>\n<|im_start|>system\nb"),
    "mistral": Family(
        ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]", "</s>"),
        _MISTRAL,
        "a[/INST]b</s>[INST]c",
    ),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), _GEMMA, "a<end_of_turn>\n<start_of_turn>model\nb"
    ),
    "phi_3": Family(
        ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>", "<|end|>"),
        _PHI_3,
        "a<|end|>\n<|system|>\nb",
    ),
    "everything": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _EVERYTHING, "a<|im_end|>\n<|im_start|>system\nb"
    ),
}  # fmt: skip
