"""Configurations of Qwen3-TTS checkpoints, for ``transformers.AutoConfig``; no code of a checkpoint is run.

A checkpoint has two. ``config.json`` is of ``model_type`` ``qwen3_tts``: a talker, its code predictor, and a speaker
encoder where ``tts_model_type`` is ``base``. ``speech_tokenizer/config.json`` is of ``qwen3_tts_tokenizer_12hz``: an
encoder, which is Mimi's, and a decoder. Field names are those of the files. Defaults are those of the reference
(``qwen-tts`` 0.1.1), which has none for what checkpoints always say.
"""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

from transformers import AutoConfig, MimiConfig, PreTrainedConfig


class Qwen3TTSSpeakerEncoderConfig(PreTrainedConfig):
    """The ECAPA-TDNN that makes a speaker embedding of ``enc_dim`` numbers from a mel spectrogram.

    The lists have one entry per block: a TDNN, squeeze-excitation Res2Net blocks, and the aggregation of the latter.
    """

    model_type = "qwen3_tts_speaker_encoder"

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: list[int] | None = None
    enc_kernel_sizes: list[int] | None = None
    enc_dilations: list[int] | None = None
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000

    def __post_init__(self, **kwargs: Any) -> None:
        self.enc_channels = self.enc_channels or [512, 512, 512, 512, 1536]
        self.enc_kernel_sizes = self.enc_kernel_sizes or [5, 3, 3, 3, 1]
        self.enc_dilations = self.enc_dilations or [1, 2, 3, 4, 1]
        if not len(self.enc_channels) == len(self.enc_kernel_sizes) == len(self.enc_dilations):
            raise ValueError(
                "enc_channels, enc_kernel_sizes and enc_dilations have one entry per block each; they have "
                f"{len(self.enc_channels)}, {len(self.enc_kernel_sizes)} and {len(self.enc_dilations)}"
            )
        super().__post_init__(**kwargs)


class Qwen3TTSTalkerCodePredictorConfig(PreTrainedConfig):
    """The small decoder that predicts code groups 1 to ``num_code_groups - 1`` of a frame, one after another."""

    model_type = "qwen3_tts_talker_code_predictor"

    vocab_size: int = 2048
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    attention_dropout: float | int = 0.0
    num_code_groups: int = 32

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            windowed = self.sliding_window is not None
            self.layer_types = [
                "sliding_attention" if windowed and i >= self.max_window_layers else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__(**kwargs)


class Qwen3TTSTalkerConfig(PreTrainedConfig):
    """The decoder that predicts code group 0 of each frame from text and codes.

    Codes of group 0 are tokens below ``vocab_size - 1024``; above them are the ``codec_*`` tokens, languages
    (``codec_language_id``) and speakers (``spk_id``). ``spk_is_dialect`` has for each speaker ``False``, or the key in
    ``codec_language_id`` of the dialect that the speaker speaks.
    """

    model_type = "qwen3_tts_talker"
    sub_configs: ClassVar = {"code_predictor_config": Qwen3TTSTalkerCodePredictorConfig}
    # Three axes of positions are declared, which the model always gives the same numbers: ordinary rotary embedding.
    ignore_keys_at_rope_validation: ClassVar = {"mrope_section", "interleaved", "type"}

    code_predictor_config: dict[str, Any] | PreTrainedConfig | None = None
    vocab_size: int = 3072
    hidden_size: int = 1024
    intermediate_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    attention_dropout: float | int = 0.0
    num_code_groups: int = 32
    text_hidden_size: int = 2048
    text_vocab_size: int = 151936
    codec_eos_token_id: int = 4198
    codec_think_id: int = 4202
    codec_nothink_id: int = 4203
    codec_think_bos_id: int = 4204
    codec_think_eos_id: int = 4205
    codec_pad_id: int = 4196
    codec_bos_id: int = 4197
    spk_id: dict[str, int] | None = None
    spk_is_dialect: dict[str, Any] | None = None
    codec_language_id: dict[str, int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.code_predictor_config = _sub_config(Qwen3TTSTalkerCodePredictorConfig, self.code_predictor_config)
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.spk_id = self.spk_id or {}
        self.spk_is_dialect = self.spk_is_dialect or {}
        self.codec_language_id = self.codec_language_id or {}
        super().__post_init__(**kwargs)


class Qwen3TTSConfig(PreTrainedConfig):
    """``config.json`` of a checkpoint.

    ``tts_model_type`` is ``custom_voice``, ``voice_design`` or ``base``: what the checkpoint can do. ``tts_model_size``
    is ``0b6`` or ``1b7``. The ``tts_*`` and ``im_*`` tokens are of the text vocabulary.
    """

    model_type = "qwen3_tts"
    sub_configs: ClassVar = {
        "talker_config": Qwen3TTSTalkerConfig,
        "speaker_encoder_config": Qwen3TTSSpeakerEncoderConfig,
    }

    talker_config: dict[str, Any] | PreTrainedConfig | None = None
    speaker_encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    tokenizer_type: str | None = None
    tts_model_size: str | None = None
    tts_model_type: str | None = None
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673

    def __post_init__(self, **kwargs: Any) -> None:
        self.talker_config = _sub_config(Qwen3TTSTalkerConfig, self.talker_config)
        self.speaker_encoder_config = _sub_config(Qwen3TTSSpeakerEncoderConfig, self.speaker_encoder_config)
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The talker's: the part that vLLM runs as a language model."""
        return self.talker_config


class Qwen3TTSTokenizerDecoderConfig(PreTrainedConfig):
    """From codes to samples: split RVQ, a transformer with a sliding window, upsampling convolutions."""

    model_type = "qwen3_tts_tokenizer_12hz_decoder"

    codebook_size: int = 2048
    codebook_dim: int = 512
    hidden_size: int = 1024
    latent_dim: int = 1024
    max_position_embeddings: int = 8000
    rope_parameters: dict[str, Any] | None = None
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = None
    attention_bias: bool = False
    sliding_window: int = 72
    intermediate_size: int = 3072
    hidden_act: str = "silu"
    layer_scale_initial_scale: float = 0.01
    rms_norm_eps: float = 1e-5
    num_hidden_layers: int = 8
    num_quantizers: int = 16
    upsample_rates: list[int] | tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: list[int] | tuple[int, ...] = (2, 2)
    decoder_dim: int = 1536
    attention_dropout: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def samples_per_frame(self) -> int:
        """Samples that one frame of codes becomes: 1920 in every known checkpoint."""
        return math.prod([*self.upsample_rates, *self.upsampling_ratios])


class Qwen3TTSTokenizer12HzConfig(PreTrainedConfig):
    """``speech_tokenizer/config.json``: rates are in Hz, ``encode_downsample_rate`` in samples per frame."""

    model_type = "qwen3_tts_tokenizer_12hz"
    sub_configs: ClassVar = {"encoder_config": MimiConfig, "decoder_config": Qwen3TTSTokenizerDecoderConfig}

    encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    decoder_config: dict[str, Any] | PreTrainedConfig | None = None
    encoder_valid_num_quantizers: int = 16
    input_sample_rate: int = 24000
    output_sample_rate: int = 24000
    decode_upsample_rate: int = 1920
    encode_downsample_rate: int = 1920

    def __post_init__(self, **kwargs: Any) -> None:
        self.encoder_config = _sub_config(MimiConfig, self.encoder_config)
        self.decoder_config = _sub_config(Qwen3TTSTokenizerDecoderConfig, self.decoder_config)
        super().__post_init__(**kwargs)


def register() -> None:
    """Make ``AutoConfig`` know the two kinds of ``config.json``. May be called again."""
    for config in (Qwen3TTSConfig, Qwen3TTSTokenizer12HzConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def _sub_config(kind: type[PreTrainedConfig], values: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
    """The configuration that ``values`` say; a copy, since transformers writes into the dictionary of rope settings."""
    return values if isinstance(values, PreTrainedConfig) else kind(**copy.deepcopy(values or {}))
