/* The decay of heads with a state. */
#include "state.h"

#include <math.h>

/* log(1 + e^x) */
static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

void find_decay(const Rates *rates, const element *a, float *dt, float *decay) {
    for (int64_t head = 0; head < rates->num_heads; head += 16) {
        Mask mask = lanes(rates->num_heads - head);
        store_some(dt + head, mask, add16(load16(a + head, mask), load_some(rates->dt_bias + head, mask)));
    }
    for (int64_t head = 0; head < rates->num_heads; head++) {
        float found = softplus(dt[head]);
        if (found < rates->min_dt) found = rates->min_dt;
        if (found > rates->max_dt) found = rates->max_dt;
        dt[head] = found;
        decay[head] = expf(rates->rate[head] * found);
    }
}
