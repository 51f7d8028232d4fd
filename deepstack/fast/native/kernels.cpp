// Runs a table of recorded operations.  Compiled on first use (compiler.py), called by ctypes.
#include "attention.h"
#include "elementwise.h"
#include "products.h"
#include "reductions.h"
#include "team.h"

// Elementwise kinds of one, two and three operands.
template <class F>
constexpr Kind one(const char* name) {
    return {name, map1<F, float, float>, split_elements<float, float>};
}
template <class F, class B = float>
constexpr Kind two(const char* name) {
    return {name, map2<F, float, float, B>, split_elements<float, float, B>};
}
template <class F, class A = float>
constexpr Kind three(const char* name) {
    return {name, map3<F, A>, split_elements<float, A, float, float>};
}

static const Kind KINDS[] = {
    one<Copy>("copy"),
    one<Scale>("scale"),
    one<Divide>("divide"),
    one<Abs>("abs"),
    one<Sign>("sign"),
    one<Square>("square"),
    one<Sqrt>("sqrt"),
    one<Rsqrt>("rsqrt"),
    one<Reciprocal>("reciprocal"),
    one<Power>("power"),
    one<Exp>("exp"),
    one<Log>("log"),
    one<Sine>("sine"),
    one<Cosine>("cosine"),
    one<Relu>("relu"),
    one<Sigmoid>("sigmoid"),
    one<Tanh>("tanh"),
    one<Silu>("silu"),
    one<Gelu>("gelu"),
    one<GeluTanh>("gelu_tanh"),
    one<Elu>("elu"),
    one<Clamp>("clamp"),
    one<Threshold>("threshold"),
    two<Add>("add"),
    two<Multiply>("multiply"),
    two<Quotient>("quotient"),
    two<ThresholdGradient>("threshold_gradient"),
    two<SigmoidGradient>("sigmoid_gradient"),
    two<TanhGradient>("tanh_gradient"),
    two<SiluGradient>("silu_gradient"),
    two<GeluGradient>("gelu_gradient"),
    two<EluGradient>("elu_gradient"),
    two<MaskedFill, uint8_t>("masked_fill"),
    three<AddProduct>("add_product"),
    three<AddQuotient>("add_quotient"),
    three<Lerp>("lerp"),
    three<Where, uint8_t>("where"),
    {"set_value", set_value, split_elements<float>},
    {"sum", reduce<false>, split_reduction},
    {"norm", reduce<true>, split_reduction},
    {"layer_norm", layer_norm, split_layer_norm},
    {"layer_norm_gradient", layer_norm_gradient, split_layer_norm_gradient},
    {"softmax", softmax<false>, split_softmax},
    {"log_softmax", softmax<true>, split_softmax},
    {"softmax_gradient", softmax_gradient<false>, split_softmax_gradient},
    {"log_softmax_gradient", softmax_gradient<true>, split_softmax_gradient},
    {"product", product, split_product},
    {"attention", attention, split_attention},
    {"attention_gradient", attention_gradient, split_attention_gradient},
};

static const Kind& kind_of(const Op& op) { return KINDS[op.kind]; }

extern "C" {
// The name of a kind, or 0 after the last one.
const char* deepstack_kind(int kind) {
    return kind < int(sizeof KINDS / sizeof *KINDS) ? KINDS[kind].name : nullptr;
}
int deepstack_record_size() { return sizeof(Op); }
int deepstack_vector_width() { return W; }

// Write how threads divide a table, 1 + threads integers for each record (see team.h).
void deepstack_plan(const Op* ops, long count, int threads, int32_t* plan) {
    for (long first = 0; first < count; first += CHUNK)
        plan_chunk(ops + first, std::min(CHUNK, count - first), threads,
                   plan + first * (1 + threads));
}
void deepstack_run(const Op* ops, long count, int threads, const int32_t* plan) {
    if (threads > 1) return Team::of_process().run(ops, count, threads, plan);
    run_alone(ops, count);
}
// Run one thread's part of one record in this thread; plan: the record's.
void deepstack_run_part(const Op* op, int thread, int threads, const int32_t* plan) {
    run_part(*op, plan, thread, threads);
}
}
