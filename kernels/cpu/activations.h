/* The activations of a linear layer on vectors, each 0 at 0. Their errors in float32 are below 2e-7 * max(1, |x|). */
#ifndef TOKENLOOM_ACTIVATIONS_H
#define TOKENLOOM_ACTIVATIONS_H

#include "kernels.h"

/* x * P(X <= x) of a standard normal X; P(X > a) is e^(-a^2 / 2) times a polynomial in 1 / (1 + 0.33 a). */
INLINE Floats gelu_16(Floats x) {
    Floats one = fill16(1.0f), t = divide16(one, multiply_add16(magnitude16(x), fill16(0.33f), one));
    Floats p = fill16(0.044926092f);
    p = multiply_add16(p, t, fill16(-0.21767744f));
    p = multiply_add16(p, t, fill16(0.32559248f));
    p = multiply_add16(p, t, fill16(-0.083499020f));
    p = multiply_add16(p, t, fill16(0.17770840f));
    p = multiply_add16(p, t, fill16(0.12045741f));
    p = multiply_add16(p, t, fill16(0.13249208f));
    Floats bell = exp2_16(multiply16(multiply16(x, x), fill16(-0.5f * LOG2_E)));
    Floats above = multiply16(bell, multiply16(p, t));
    return multiply16(x, choose(at_least(x, zero16()), subtract16(one, above), above));
}

/* x / 2 * (1 + tanh(u)) = x / (1 + e^(-2 u)) for u = sqrt(2 / pi) * (x + 0.044715 x^3) */
INLINE Floats gelu_tanh_16(Floats x) {
    const float factor = -2 * 0.79788456f * LOG2_E;
    Floats slope = multiply_add16(multiply16(x, x), fill16(0.044715f * factor), fill16(factor));
    return divide16(x, add16(exp2_16(multiply16(x, slope)), fill16(1.0f)));
}

/* x / (1 + e^(-1.702 x)) */
INLINE Floats quick_gelu_16(Floats x) {
    return divide16(x, add16(exp2_16(multiply16(x, fill16(-1.702f * LOG2_E))), fill16(1.0f)));
}

INLINE Floats clamp_16(float limit, Floats x) { return larger16(fill16(-limit), smaller16(fill16(limit), x)); }

INLINE Floats activate_16(ActivationKind kind, float limit, Floats x) {
    if (kind == SILU) return silu_16(x);
    if (kind == GELU) return gelu_16(x);
    if (kind == GELU_TANH) return gelu_tanh_16(x);
    if (kind == QUICK_GELU) return quick_gelu_16(x);
    if (kind == NO_ACTIVATION) return x;
    if (kind == CLAMP) return clamp_16(limit, x);
    x = larger16(zero16(), x); /* NaN stays */
    return kind == RELU ? x : multiply16(x, x);
}

INLINE Floats activate_gated_16(ActivationKind kind, float limit, Floats gate, Floats up) {
    if (kind != SWIGLU_CLAMPED) return multiply16(activate_16(kind, limit, gate), up);
    gate = smaller16(fill16(limit), gate);
    up = clamp_16(limit, up);
    Floats scaled = silu_16(multiply16(gate, fill16(1.702f)));
    return multiply16(multiply16(scaled, fill16(1 / 1.702f)), add16(up, fill16(1.0f)));
}

#endif
