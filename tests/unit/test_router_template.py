"""Chat templates: what they can use, how they fail, and what they cannot do."""

import pytest

from router import chat_template
from router.chat_template import ChatTemplate, Message, TemplateRefusal
from router.config import ConfigError

HI = [Message("user", "hi")]


def render(source: str, messages=HI, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages, add_generation_prompt=True)


def test_templates_written_for_transformers_find_what_they_need():
    assert render("{{ bos_token }}{% if add_generation_prompt %}!{% endif %}", bos_token="<s>") == "<s>!"
    assert render("{{ messages | tojson }}", [Message("u", "é<'>")]) == '[{"role": "u", "content": "é<\'>"}]'
    assert (
        render("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'
    )
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render("{% if tools %}tools{% endif %}{{ 'x' if documents is none }}") == "x"
    assert (
        render(
            "{%- set ns = namespace(n=0) %}\n  {%- for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        )
        == "1"
    )


def test_names_are_shown_only_where_given():
    source = "{% for m in messages %}{{ m.name if 'name' in m else '-' }}{% endfor %}"
    assert render(source, [Message("user", "x", "Ann"), Message("user", "x")]) == "Ann-"


def test_templates_own_refusal_is_passed_on():
    with pytest.raises(TemplateRefusal, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[5].content }}", "{{ 1 / 0 }}", "{{ nothing.there }}", "{{ messages + 1 }}", "{{ [].pop() }}"],
)
def test_other_failures_say_nothing_of_python(source):
    with pytest.raises(TemplateRefusal) as raised:
        render(source)
    assert str(raised.value) == "the model's chat template cannot render these messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_sandbox_holds(source):
    with pytest.raises(TemplateRefusal):
        render(source)


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(TemplateRefusal, match="longer than 1000 characters"):
        render("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}")


def test_source_is_checked_at_the_start(monkeypatch):
    with pytest.raises(ConfigError, match=r"not valid Jinja.*line 2"):
        ChatTemplate("\n{% if %}", {})
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_CHARS", 10)
    with pytest.raises(ConfigError, match="at most 10"):
        ChatTemplate("x" * 11, {})
