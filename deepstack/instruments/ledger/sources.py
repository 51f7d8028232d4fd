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
