// Runs a table of recorded operations.  Compiled on first use (compiler.py), called by ctypes.
#include "attention.h"
#include "elementwise.h"
#include "products.h"
#include "reductions.h"

struct Kind {
    const char* name;
    void (*run)(const Op&);
};

template <class F>
constexpr auto one = map1<F, float, float>;
template <class F>
constexpr auto two = map2<F, float, float, float>;

static const Kind KINDS[] = {
    {"copy", one<Copy>},
    {"scale", one<Scale>},
    {"divide", one<Divide>},
    {"abs", one<Abs>},
    {"sign", one<Sign>},
    {"square", one<Square>},
    {"sqrt", one<Sqrt>},
    {"rsqrt", one<Rsqrt>},
    {"reciprocal", one<Reciprocal>},
    {"power", one<Power>},
    {"exp", one<Exp>},
    {"log", one<Log>},
    {"sine", one<Sine>},
    {"cosine", one<Cosine>},
    {"relu", one<Relu>},
    {"sigmoid", one<Sigmoid>},
    {"tanh", one<Tanh>},
    {"silu", one<Silu>},
    {"gelu", one<Gelu>},
    {"gelu_tanh", one<GeluTanh>},
    {"elu", one<Elu>},
    {"clamp", one<Clamp>},
    {"threshold", one<Threshold>},
    {"add", two<Add>},
    {"multiply", two<Multiply>},
    {"quotient", two<Quotient>},
    {"threshold_gradient", two<ThresholdGradient>},
    {"sigmoid_gradient", two<SigmoidGradient>},
    {"tanh_gradient", two<TanhGradient>},
    {"silu_gradient", two<SiluGradient>},
    {"gelu_gradient", two<GeluGradient>},
    {"elu_gradient", two<EluGradient>},
    {"masked_fill", map2<MaskedFill, float, float, uint8_t>},
    {"add_product", map3<AddProduct, float>},
    {"add_quotient", map3<AddQuotient, float>},
    {"lerp", map3<Lerp, float>},
    {"where", map3<Where, uint8_t>},
    {"set_value", set_value},
    {"sum", reduce<false>},
    {"norm", reduce<true>},
    {"layer_norm", layer_norm},
    {"layer_norm_gradient", layer_norm_gradient},
    {"softmax", softmax<false>},
    {"log_softmax", softmax<true>},
    {"softmax_gradient", softmax_gradient<false>},
    {"log_softmax_gradient", softmax_gradient<true>},
    {"product", product},
    {"attention", attention},
    {"attention_gradient", attention_gradient},
};

extern "C" {
// The name of a kind, or 0 after the last one.
const char* deepstack_kind(int kind) {
    return kind < int(sizeof KINDS / sizeof *KINDS) ? KINDS[kind].name : nullptr;
}
int deepstack_record_size() { return sizeof(Op); }
int deepstack_vector_width() { return W; }
void deepstack_run(const Op* ops, long count) {
    for (const Op* op = ops; op < ops + count; op++) KINDS[op->kind].run(*op);
}
}
