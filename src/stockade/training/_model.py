"""A tiny causal language model and its tokenizer, both made here: no model hub is asked."""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, START, END, UNKNOWN = SPECIAL
VOCABULARY: Final = 400
CONTEXT: Final = 256
HEAD_SIZE: Final = 32
MAX_NEW_TOKENS: Final = 28
"""The longest right program has 25 tokens."""

PIECES: Final = r" ?[0-9]| ?[A-Za-z_]+|\n[ ]*| ?[^\sA-Za-z0-9_]|\s"
"""One token a digit; a word or an operator takes the blank before it along."""


def make_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of at most 400 pieces on ``corpus``."""
    core = Tokenizer(models.BPE(unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    core.decoder = decoders.Fuse()
    alphabet = sorted({*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"})
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int) -> PreTrainedModel:
    """Return a Llama with random weights; 0.66 million parameters at hidden 128 and 3 layers."""
    heads = max(1, hidden // HEAD_SIZE)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=CONTEXT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
            attention_dropout=0.0,
        )
    )


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Load what :func:`save` wrote. Weights come from safetensors only: a pickle would be code."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    return tokenizer, model


def save(folder: Path, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
    """Write model and tokenizer as transformers reads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def complete(
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    prompts: list[str],
    *,
    samples: int,
    temperature: float | None,
) -> list[str]:
    """Return ``samples`` completions for each prompt, those of one prompt side by side; greedy if no temperature."""
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    settings = (
        {"do_sample": False}
        if temperature is None
        else {"do_sample": True, "temperature": temperature, "top_k": 0, "num_return_sequences": samples}
    )
    was_training = model.training
    model.eval()
    tokens = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    model.train(was_training)
    new = tokens[:, encoded["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
