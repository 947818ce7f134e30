"""Tokenizers of decoder-only models: special tokens, chat templates, broken files."""

import json
import sys

import pytest
import tiny_pair

from osd_jax import assets, base
from osd_jax.data import chat
from osd_jax.data import vocabulary as vocabularies
from osd_jax.data.vocabulary import Vocabulary

TEXTS = ["How many singers are older than 30?", "SELECT name FROM singer", "x = 3 + 4"]
TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
  " {{ message['content'] }}\n{% endfor %}"
  "{% if add_generation_prompt %}[assistant] {% endif %}"
  "{% if thinks is defined and thinks is false %}</think>{% endif %}"
)


@pytest.fixture(scope="module")
def model():
  return tiny_pair.llama_tokenizer()


@pytest.fixture
def folder(model, tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(model)
  return tmp_path


def json_tokenizer(folder, **settings):
  """Writes a word-level `tokenizer.json` that puts `<s>` in front of every text."""
  library = pytest.importorskip("tokenizers")
  words = {"<s>": 0, "</s>": 1, "<unk>": 2, "<|end|>": 3, "a": 4, "b": 5, "c": 6}
  made = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
  made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
  made.post_processor = library.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 0)]
  )
  made.add_special_tokens(["<s>", "</s>", "<unk>", "<|end|>"])
  made.save(str(folder / "tokenizer.json"))
  stated = {"eos_token": "</s>", "bos_token": "<s>", **settings}
  (folder / "tokenizer_config.json").write_text(json.dumps(stated))
  return folder


def test_prompt_has_a_prefix_token_and_no_end_token(folder):
  vocabulary = Vocabulary.load(folder)
  prompt = vocabulary.encode_prompt(TEXTS[0])
  assert prompt[0] == 1 and 2 not in prompt
  assert prompt[1:].tolist() == vocabulary.encode(TEXTS[0])
  assert vocabulary.encode_with_eos(TEXTS[0]).tolist() == [*prompt[1:], 2]
  assert (vocabulary.pad_id, vocabulary.eos_ids) == (base.NO_TOKEN, (2,))


@pytest.mark.parametrize("text", [*TEXTS, "naïve 漢字 🙂", "  two  spaces ", "\t\n"])
def test_decode_inverts_encode_and_ignores_ids_after_the_end(folder, text):
  vocabulary = Vocabulary.load(folder)
  ids = vocabulary.encode_with_eos(text)
  assert vocabulary.decode([*ids, 5, 6]) == text  # ids after the end are ignored
  assert vocabulary.decode([-1, *ids]) == text


def test_special_tokens_in_a_text_are_encoded_as_their_ids(folder):
  vocabulary = Vocabulary.load(folder)
  ids = vocabulary.encode("<s>x = 3</s>")
  assert (ids[0], ids[-1]) == (1, 2)
  assert vocabulary.encode("< s>x")[0] != 1  # negative control


def test_cut_prompt_keeps_the_right_end_for_each_family(folder):
  vocabulary = Vocabulary.load(folder)
  prompt = vocabulary.encode_prompt(TEXTS[0])
  # Llama's tokenizer keeps the prefix token and the last tokens, T5's keeps the first
  # tokens and the end-of-sequence token.
  cut = vocabulary.cut_prompt(prompt, 5)
  assert cut.tolist() == [1, *prompt[-4:]]
  assert vocabulary.cut_prompt(prompt, len(prompt)) is prompt
  t5 = Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))
  ids = t5.encode_prompt(TEXTS[0])
  assert t5.cut_prompt(ids, 4).tolist() == [*ids[:3], 1]


def test_is_blank_is_true_only_for_prompts_without_text(folder):
  vocabulary = Vocabulary.load(folder)
  assert vocabulary.is_blank(vocabulary.encode_prompt(""))
  assert not vocabulary.is_blank(vocabulary.encode_prompt("x"))


def test_end_tokens_come_from_the_generation_config(folder):
  (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
  assert Vocabulary.load(folder).eos_ids == (2,)
  ends = {"eos_token_id": [9, 2, 11]}
  (folder / "generation_config.json").write_text(json.dumps(ends))
  vocabulary = Vocabulary.load(folder)
  # The tokenizer's own end token comes first, because encoding appends that one.
  assert vocabulary.eos_ids == (2, 9, 11)
  for end in vocabulary.eos_ids:
    assert vocabulary.decode([*vocabulary.encode("x = 3"), end, 20]) == "x = 3"


def test_equal_files_give_equal_vocabularies(folder, model, tmp_path_factory):
  other = tmp_path_factory.mktemp("copy")
  (other / "tokenizer.model").write_bytes(model)
  one, same = Vocabulary.load(folder), Vocabulary.load(other)
  assert one == same and hash(one) == hash(same)
  (other / "config.json").write_text(json.dumps({"eos_token_id": 5}))
  assert Vocabulary.load(other) != one  # the end token differs


def test_tokenizer_json_is_encoded_with_its_own_rules(tmp_path):
  vocabulary = Vocabulary.load(json_tokenizer(tmp_path))
  assert vocabulary.encode_prompt("a b <|end|> c").tolist() == [0, 4, 5, 3, 6]
  assert (vocabulary.prefix, vocabulary.eos_ids, vocabulary.size) == ((0,), (1,), 7)
  assert vocabulary.decode([4, 5, 3, 6, 1, 4]) == "a b c"
  assert vocabulary.encode("zebra") == [2]


# ---- Chat templates


def test_template_own_uses_the_template_of_the_folder(folder):
  settings = {"chat_template": TEMPLATE, "bos_token": "<s>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  vocabulary = Vocabulary.load(folder, template="own")
  expected = "<s>[user] x = 3\n[assistant] "
  assert vocabulary.template("x = 3") == expected
  ids = vocabulary.encode_prompt("x = 3")
  assert ids.tolist() == vocabulary.encode(expected) and ids.tolist().count(1) == 1
  (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
  assert Vocabulary.load(folder, template="own").template("x") == "x!"
  assert Vocabulary.load(folder).template is None


def test_template_can_be_given_as_text(folder):
  text = "USER: {{ messages[0]['content'] }} ASSISTANT:"
  vocabulary = Vocabulary.load(folder, template=text)
  assert vocabulary.template("hi") == "USER: hi ASSISTANT:"
  assert vocabulary != Vocabulary.load(folder)


def test_template_is_rendered_with_variables(folder):
  load = lambda *variables: Vocabulary.load(folder, 0, TEMPLATE, variables)
  thinks, answers = load(), load(("thinks", False))
  assert answers.template("x") == thinks.template("x") + "</think>"
  assert thinks != answers == load(("thinks", False))
  with pytest.raises(base.InputError, match="template_variables.*no chat template"):
    Vocabulary.load(folder, variables=(("thinks", False),))


IN_PARTS = (
  "{% for m in messages %}{% for part in m.content %}{{ part.text }};"
  "{% endfor %}{% endfor %}"
)
CHOSEN = "{{ (messages[0].content | selectattr('type', 'eq', 'text') | first).text }};"
FIRST = "{{ messages[0]['content'][0]['text'] + ';' }}"


@pytest.mark.parametrize("text", [IN_PARTS, CHOSEN, FIRST])
def test_template_that_reads_parts_is_given_parts(folder, text):
  vocabulary = Vocabulary.load(folder, template=text)
  assert vocabulary.template("the rain") == "the rain;"
  conversation = chat.Conversation([{"role": "user", "content": "snow", "name": "A"}])
  assert vocabulary.template(conversation) == "snow;"


def test_conversation_begins_with_one_beginning_of_text(folder):
  vocabulary = Vocabulary.load(folder, template=TEMPLATE)
  roles = ("system", "user", "assistant", "user")
  messages = [{"role": role, "content": role[0]} for role in roles]
  prompt = chat.Conversation(messages)
  assert vocabulary.template(prompt).startswith("<s>[system] s\n[user] u\n[assistant]")
  ids = vocabulary.encode_prompt(prompt).tolist()
  assert (*ids[:1], ids.count(1)) == (*vocabulary.prefix, 1)


@pytest.mark.parametrize(
  "template, match",
  [
    ("{{ messages[0]['content'] ", "template failed"),
    ("{{ raise_exception('only pairs of turns') }}", "only pairs of turns"),
    ("{{ messages[0].role }}", "does not write the text of a user's message"),
    ("{{ messages.__class__.__mro__ }}", "template failed.*unsafe"),
    ("own", "has no chat template"),
  ],
)
def test_unusable_templates_are_refused_with_the_reason(folder, template, match):
  with pytest.raises(base.InputError, match=match):
    Vocabulary.load(folder, template=template)


# ---- Broken input


@pytest.mark.parametrize("library, template", [("transformers", ""), ("jinja2", "own")])
def test_missing_library_error_names_the_extra(
  tmp_path, library, template, monkeypatch
):
  json_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}")
  # Negative control: with the library installed, loading succeeds.
  assert Vocabulary.load(tmp_path, template=template)
  vocabularies._build.cache_clear()
  monkeypatch.setitem(sys.modules, library, None)
  with pytest.raises(base.MissingExtraError, match=r"osd_jax\[llama\]"):
    Vocabulary.load(tmp_path, template=template)


def test_tokenizer_without_an_end_token_is_refused(tmp_path):
  json_tokenizer(tmp_path, eos_token=None)
  with pytest.raises(base.InputError, match="no token ends a sequence"):
    Vocabulary.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_file_that_is_not_a_tokenizer_is_refused_by_name(tmp_path, name):
  (tmp_path / name).write_bytes(b"{no tokenizer")
  with pytest.raises(base.InputError, match=f"{name} (is not a|.* cannot be read)"):
    Vocabulary.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_missing_file_is_reported_as_missing(tmp_path, name):
  """The error says that the file is missing, not that it is empty."""
  missing = rf"{name} cannot be read \(No such file.*expected a tokenizer.json or"
  with pytest.raises(base.InputError, match=missing):
    Vocabulary.load(tmp_path / "nowhere" / name)


def test_malformed_tokenizer_config_is_refused_by_name(folder):
  (folder / "tokenizer_config.json").write_text("[1, 2]")
  with pytest.raises(base.InputError, match=r"tokenizer_config.json cannot be read"):
    Vocabulary.load(folder)


def test_settings_of_the_other_model_family_are_refused(folder):
  with pytest.raises(base.InputError, match="extra_ids: received 100"):
    Vocabulary.load(folder, extra_ids=100)
  t5 = assets.resolve("shipped:demo_vocabulary.model")
  with pytest.raises(base.InputError, match=r"chat_template: received 'own'"):
    Vocabulary.load(t5, template="own")


# ---- Comparison with transformers


def real_lines(folder):
  """Returns the texts of the first 80 lines of every data set."""
  found = []
  for path in sorted(folder.glob("*.jsonl")):
    for line in path.read_text().splitlines()[:80]:
      found += [text for text in json.loads(line).values() if isinstance(text, str)]
  return [text for text in found if text.strip()]


@pytest.mark.parametrize("legacy", [False, True])
def test_ids_of_llama_tokenizer_model_equal_those_of_transformers(
  shared_data, tmp_path, legacy
):
  """Compares 1,000 real lines, byte-fallback characters and special tokens.

  Texts with two spaces in a row or a leading space are left out. transformers 5 orders
  the merges of a `tokenizer.model` by id and not by score, so for those texts its ids
  differ from SentencePiece's, which the models were trained with.
  """
  transformers = pytest.importorskip("transformers")
  real = (shared_data / "tokenizers/llama2/tokenizer.model").read_bytes()
  (tmp_path / "tokenizer.model").write_bytes(real)
  settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
  settings |= {"unk_token": "<unk>", "legacy": legacy}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  ours = Vocabulary.load(tmp_path)
  theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
  lines = [line for line in real_lines(shared_data) if line[0] != " "]
  lines = [line for line in lines if "  " not in line][:1000]
  assert len(lines) == 1000
  lines += ["naïve 漢字 🙂 \x07", "a</s>b", "<s>[INST] x [/INST]", "\n\n"]
  for line in lines:
    expected = theirs(line).input_ids
    assert ours.encode_prompt(line).tolist() == expected, line
    if not set(expected[1:]) & {0, 1, 2}:
      written = theirs.decode(expected, skip_special_tokens=True)
      assert ours.decode(expected[1:]) == written
