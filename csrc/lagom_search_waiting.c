/* Streams whose collectives wait for kernels (waiting.py), one assignment and one draw after the other. */
#include "lagom_search.h"

/* One draw: what a kernel or a collective takes is `stride` numbers behind the one before. */
static double ended_s(const double *kernels, int64_t num_kernels, const double *lost, const double *alone, int64_t num,
                      int64_t stride, double slower) {
    double now = 0, left = kernels[0], work = alone[0] * slower;
    bool waits = true;
    int64_t i = 0, j = 0;
    for (int64_t events = 0; i < num_kernels && events < num_kernels + num; events++) {
        bool moves = !waits && j < num;
        double rate = moves ? 1 - lost[j * stride] : 1, to_kernel_end = left / rate;
        bool kernel_ends = !moves || to_kernel_end <= work, comm_ends = moves && work <= to_kernel_end;
        double step = kernel_ends ? to_kernel_end : work;
        now += step;
        i += kernel_ends, j += comm_ends;
        left = !kernel_ends ? left - step * rate : i < num_kernels ? kernels[i * stride] : 0;
        if (comm_ends) {
            work = j < num ? alone[j * stride] * slower : 0;
        } else if (moves) {
            work -= step;
        }
        waits = comm_ends || (waits && !kernel_ends);
    }
    if (i < num_kernels) return NAN; /* only where something was not a number */
    now += work / slower;            /* what is left of the stream has nothing next to it */
    for (j++; j < num; j++) now += alone[j * stride];
    return now;
}

/* When all has ended (num_assignments, num_draws). kernels (num_kernels, num_draws) are their times alone, lost what they
 * lose next to each collective, alone its time (both: num_assignments, num_comms, num_draws), slower by how much that is
 * longer next to a kernel (num_draws). */
API int ls_waiting(const double *kernels, int64_t num_kernels, const double *lost, const double *alone,
                   const double *slower, int64_t num_assignments, int64_t num_comms, int64_t num_draws, double *ended) {
    for (int64_t a = 0; a < num_assignments; a++) {
        int64_t first = a * num_comms * num_draws;
        for (int64_t d = 0; d < num_draws; d++) {
            ended[a * num_draws + d] = ended_s(kernels + d, num_kernels, lost + first + d, alone + first + d, num_comms,
                                               num_draws, slower[d]);
        }
    }
    return 0;
}
