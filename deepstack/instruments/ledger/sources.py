"""The documents whose claims are measured."""

from deepstack.instruments.ledger.claim import Source

LAYER_CAKE = Source(
    "Transformer做的千层饼 (CastellanZhang)",
    "知乎专栏 and WeChat account “AI推公式”",
    "arXiv:2203.00555, arXiv:2002.04745",
)
ADD_AND_NORM = Source("Add & Norm", "", "arXiv:1512.03385, arXiv:1607.06450, arXiv:2203.00555")
NORM_THEN_LINEAR = Source(
    "LayerNorm 层后接 Linear 层的转化形式", "https://quarryman.cn/article/20240415"
)
READING_NOTES = Source(
    "NLP|阅读随笔 (Kevin 吴嘉文)",
    "",
    "https://kexue.fm/archives/7180, https://kexue.fm/archives/8620, https://kexue.fm/archives/8747",
)
DEPTH_SCALED = Source(
    "Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention",
    "https://arxiv.org/abs/1908.11365",
)


def paper(title: str, arxiv: str) -> Source:
    """Return a paper by its title and its number on arxiv.org."""
    return Source(title, f"https://arxiv.org/abs/{arxiv}", f"arXiv:{arxiv}")


ON_LAYER_NORM = paper("On Layer Normalization in the Transformer Architecture", "2002.04745")
DEEPNET = paper("DeepNet: Scaling Transformers to 1,000 Layers", "2203.00555")
T_FIXUP = Source("Improving Transformer Optimization Through Better Initialization, ICML 2020", "")
REZERO = paper("ReZero is All You Need: Fast Convergence at Large Depth", "2003.04887")
ADMIN = paper("Understanding the Difficulty of Training Transformers", "2004.08249")
DEPTH_MUP = paper(
    "Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks", "2310.02244"
)
COMPLETE_P = paper("Don't be lazy: CompleteP enables compute-efficient deep transformers",
                   "2505.01618")  # fmt: skip
DEPTHWISE_SPECTRAL = paper("arXiv:2603.00541", "2603.00541")
HYPERP = paper("arXiv:2603.28743", "2603.28743")
CURSE = paper("The Curse of Depth in Large Language Models", "2502.05795")
PERI_LN = paper("Peri-LN: Revisiting Normalization Layer in the Transformer Architecture",
                "2502.02732")  # fmt: skip
USE_OF_DEPTH = paper("Do Language Models Use Their Depth Efficiently?", "2505.13898")
EFFECTIVE_DEPTH = paper("arXiv:2512.14064", "2512.14064")
NEIGHBOURS = paper("arXiv:2609.07876", "2609.07876")
INVERSE_DEPTH = paper("arXiv:2602.05970", "2602.05970")
SIGNAL = paper("Geometric Dynamics of Signal Propagation Predict Trainability of Transformers",
               "2403.02579")  # fmt: skip
DEEP_SCALE_LM = paper("Transformers Get Stable: An End-to-End Signal Propagation Theory for "
                      "Language Models", "2403.09635")  # fmt: skip
MHC = paper("mHC: Manifold-Constrained Hyper-Connections", "2512.24880")
STREAMS = paper("arXiv:2606.03483", "2606.03483")
DEPTH_BENCH = Source("DepthBench: causal and permutation scores of depth", "")
