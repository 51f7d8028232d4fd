"""The papers and documents whose statements are measured, and the stacks of which they speak."""

from deepstack_lab.ledger.claim import Source
from deepstack_lab.ledger.reach import Extent

LAYER_CAKE = Source(
    "Transformer做的千层饼",
    "知乎专栏 and WeChat account “AI推公式”",
    "arXiv:2203.00555, arXiv:2002.04745",
    "CastellanZhang",
)
ADD_AND_NORM = Source(
    "Add & Norm", "", "arXiv:1512.03385, arXiv:1607.06450, arXiv:2203.00555", "unsigned notes"
)
NORM_THEN_LINEAR = Source(
    "LayerNorm 层后接 Linear 层的转化形式", "https://quarryman.cn/article/20240415", "", "quarryman"
)
READING_NOTES = Source(
    "NLP|阅读随笔",
    "",
    "https://kexue.fm/archives/7180, https://kexue.fm/archives/8620, https://kexue.fm/archives/8747",
    "Kevin 吴嘉文",
)


def paper(title: str, arxiv: str, authors: str) -> Source:
    """Return a paper by its title, its number on arxiv.org and its authors."""
    return Source(title, f"https://arxiv.org/abs/{arxiv}", f"arXiv:{arxiv}", authors)


DEPTH_SCALED = paper(
    "Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention",
    "1908.11365", "Zhang, Titov, Sennrich 2019",
)  # fmt: skip
ON_LAYER_NORM = paper("On Layer Normalization in the Transformer Architecture", "2002.04745",
                      "Xiong et al. 2020")  # fmt: skip
DEEPNET = paper("DeepNet: Scaling Transformers to 1,000 Layers", "2203.00555", "Wang et al. 2022")
T_FIXUP = Source("Improving Transformer Optimization Through Better Initialization",
                 "https://proceedings.mlr.press/v119/huang20f.html", "",
                 "Huang et al. 2020")  # fmt: skip
REZERO = paper("ReZero is All You Need: Fast Convergence at Large Depth", "2003.04887",
               "Bachlechner et al. 2020")  # fmt: skip
ADMIN = paper("Understanding the Difficulty of Training Transformers", "2004.08249",
              "Liu et al. 2020")  # fmt: skip
DEPTH_MUP = paper("Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks",
                  "2310.02244", "Yang et al. 2023")  # fmt: skip
COMPLETE_P = paper("Don't be lazy: CompleteP enables compute-efficient deep transformers",
                   "2505.01618", "Dey et al. 2025")  # fmt: skip
DEPTHWISE_SPECTRAL = paper("Spectral Condition for µP under Width-Depth Scaling", "2603.00541",
                           "Zheng et al. 2026")  # fmt: skip
HYPERP = paper("Rethinking Language Model Scaling under Transferable Hypersphere Optimization",
               "2603.28743", "Ren et al. 2026")  # fmt: skip
EFFECTIVE_RATE = paper("Hyperparameter Transfer Laws for Non-Recurrent Multi-Path Neural Networks",
                       "2602.07494", "Wu et al. 2026")  # fmt: skip
CURSE = paper("The Curse of Depth in Large Language Models", "2502.05795", "Sun et al. 2025")
PERI_LN = paper("Peri-LN: Revisiting Normalization Layer in the Transformer Architecture",
                "2502.02732", "Kim et al. 2025")  # fmt: skip
USE_OF_DEPTH = paper("Do Language Models Use Their Depth Efficiently?", "2505.13898",
                     "Csordás, Manning, Potts 2025")  # fmt: skip
EFFECTIVE_DEPTH = paper("What Affects the Effective Depth of Large Language Models?", "2512.14064",
                        "Hu, Zhou, Zhang 2025")  # fmt: skip
NEIGHBOURS = paper("LLM Layers Immediately Correct Each Other", "2609.07876",
                   "Patrawala, Feng, Jones, Steinhardt 2025")  # fmt: skip
INVERSE_DEPTH = paper("Inverse Depth Scaling From Most Layers Being Similar", "2602.05970",
                      "Liu, Kangaslahti, Liu, Gore 2026")  # fmt: skip
SIGNAL = paper("Geometric Dynamics of Signal Propagation Predict Trainability of Transformers",
               "2403.02579", "Cowsik, Nebabu, Qi, Ganguli 2024")  # fmt: skip
DEEP_SCALE_LM = paper("Transformers Get Stable: An End-to-End Signal Propagation Theory for "
                      "Language Models", "2403.09635", "Kedia et al. 2024")  # fmt: skip
MHC = paper("mHC: Manifold-Constrained Hyper-Connections", "2512.24880", "Xie et al. 2025")
STREAMS = paper("Analyzing Stream Collapse in Hyper-Connections: From Diagnosis to Mitigation",
                "2606.03483", "Alimaskina, Molodtsov, Beznosikov 2026")  # fmt: skip
DEPTH_BENCH = Source("DepthBench", "https://arxiv.org/abs/2609.32534", "arXiv:2609.32534")

# The stacks of which a source speaks.
NO_SIZES = Extent()
TRANSLATION = ("encoder_decoder",)
DEEP_TRANSLATION = Extent(TRANSLATION, (512, 1024), (6, 30), data="translation, WMT and IWSLT")
LANGUAGE_MODELS = ("decoder",)
