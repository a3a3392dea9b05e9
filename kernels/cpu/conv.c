/* Causal convolutions of each channel over the last tokens of its row. */
#include "state.h"

#define NUM_CHANNELS 128 /* of a task: with fewer, a prompt's tokens, each in a page of its own, cost more misses */

/* The inputs of some channels in one row: those of its tokens in this step, and those before them. */
typedef struct {
    const Conv *conv;
    int64_t first_token; /* of the row in this step */
    int64_t channel, num_channels;
    element before[MAX_TAPS - 1][NUM_CHANNELS];
} Inputs;

/* Returns the inputs of a token of the step, at most num_taps - 1 before the row's first. */
INLINE const element *inputs_of(const Inputs *inputs, int64_t token) {
    const Conv *conv = inputs->conv;
    int64_t index = token - inputs->first_token;
    if (index < 0) return inputs->before[index + conv->num_taps - 1];
    return conv->x + token * conv->x_stride + inputs->channel;
}

static void read_state(Inputs *inputs, int64_t block) {
    const Conv *conv = inputs->conv;
    size_t num_bytes = (size_t)inputs->num_channels * sizeof(element);
    for (int64_t i = 0; i < conv->num_taps - 1; i++) {
        const element *from = conv->states + block * conv->block_stride + i * conv->num_channels + inputs->channel;
        if (block < 0) memset(inputs->before[i], 0, num_bytes);
        else memcpy(inputs->before[i], from, num_bytes);
    }
}

/* Writes the state before a token. */
static void write_state(const Inputs *inputs, int64_t token, int64_t block) {
    const Conv *conv = inputs->conv;
    for (int64_t i = 0; i < conv->num_taps - 1; i++) {
        element *to = conv->states + block * conv->block_stride + i * conv->num_channels + inputs->channel;
        memcpy(to, inputs_of(inputs, token - conv->num_taps + 1 + i), (size_t)inputs->num_channels * sizeof(element));
    }
}

static void convolve_token(const Inputs *inputs, int64_t token) {
    const Conv *conv = inputs->conv;
    const element *taken[MAX_TAPS];
    for (int64_t tap = 0; tap < conv->num_taps; tap++) taken[tap] = inputs_of(inputs, token - conv->num_taps + 1 + tap);
    element *out = conv->out + token * conv->num_channels + inputs->channel;
    for (int64_t i = 0; i < inputs->num_channels; i += 16) {
        Mask mask = lanes(inputs->num_channels - i);
        const float *factors = conv->factors + inputs->channel + i;
        Floats sum = conv->bias == NULL ? zero16() : load_some(conv->bias + inputs->channel + i, mask);
        for (int64_t tap = 0; tap < conv->num_taps; tap++, factors += conv->num_channels)
            sum = multiply_add16(load16(taken[tap] + i, mask), load_some(factors, mask), sum);
        store16(out + i, mask, conv->has_silu ? silu_16(sum) : sum);
    }
}

void convolve(const Conv *conv, const Segments *segments, Team *team) {
    int64_t num_parts = divide_up(conv->num_channels, NUM_CHANNELS), num_tasks = segments->num_segments * num_parts;
    Inputs inputs = {.conv = conv};
    for (Range range; take_falling(team, num_tasks, &range); finish_falling(team, num_tasks))
        for (int64_t task = range.start; task < range.stop; task++) {
            int64_t segment = task / num_parts;
            if (continues_row(segments, segment)) continue;
            inputs.first_token = segments->starts[segment];
            inputs.channel = task % num_parts * NUM_CHANNELS;
            inputs.num_channels = min64(NUM_CHANNELS, conv->num_channels - inputs.channel);
            read_state(&inputs, segments->reads[segment]);
            do {
                int64_t stop = segments->starts[segment + 1];
                for (int64_t token = segments->starts[segment]; token < stop; token++) convolve_token(&inputs, token);
                if (segments->writes[segment] >= 0) write_state(&inputs, stop, segments->writes[segment]);
            } while (continues_row(segments, ++segment));
        }
}
