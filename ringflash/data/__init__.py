"""Text as packed byte tokens: found, cached once, split by document, read a few rows at a time. numpy only."""
from .corpus import Corpus, Split, load_corpus
from .entropy import unigram_entropy
from .packing import LazyTokens, PackedDataset
from .sources import Source, find_source
from .tokens import DOCUMENT_START, VOCAB_SIZE

__all__ = ["DOCUMENT_START", "VOCAB_SIZE", "Corpus", "LazyTokens", "PackedDataset", "Source", "Split", "find_source",
           "load_corpus", "unigram_entropy"]
