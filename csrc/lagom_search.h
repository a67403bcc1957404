/* liblagom_search.so: the model of the machine in the tuner `ours`: its two curves, their fits, surrogates and the search on them;
 * and what of the tuner's other family is worth a compiler.
 *
 * What is computed and why: src/lagom_overlap/tuners/machine (group_model.py, surrogate.py); a second,
 * plain implementation in numpy stands in the tests. Here is only what is worth a compiler: an iteration of tens of
 * groups is planned within one step of training.
 *
 * Pure functions: no state, no threads, no I/O. All arrays are the caller's, row by row without gaps, and valid: only
 * what a computation may produce by itself (not a number, infinite) is met with care. Functions return 0, or -1 where
 * memory is wanting.
 *
 *   lagom_search_fit.c        least squares with priors
 *   lagom_search_wire.c       a collective's time: its curve and the fit of it
 *   lagom_search_wires.c      what that curve misses, smoothed
 *   lagom_search_body.c       the computations during collectives: their times and the fit of them
 *   lagom_search_surrogate.c   whole assignments: what the computations' curve misses, candidates
 *   lagom_search_allocate.c   the best assignment
 *   lagom_search_waiting.c    collectives that wait for kernels, by the curves
 */
#ifndef LAGOM_SEARCH_H
#define LAGOM_SEARCH_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { LS_VERSION = 3, NUM_SHARED = 8, NUM_OF_KIND = 4, NUM_BODY = 6 };
static const double LEAST_VARIANCE = 1e-8;

/* Places of one or several collectives; `near` and `steps` are (num_places, num_places): how alike two places are to a
 * smooth curve, and to one that steps where channels complete a wave. */
struct ls_lattice {
    int64_t num_places;
    const double *channels, *chunk_bytes;
    const int64_t *kind;
    const double *near, *steps;
};

/* A group: what does not change during its search. fluid, whole: (num_sm_counts, most_channels + 1, num_kernels). */
struct ls_group {
    int64_t num_comms, num_lattices, most_places, num_kernels, most_channels, knows_grid, num_kinds;
    const struct ls_lattice *lattices;
    const int64_t *lattice_of;
    const double *wire_bytes;
    const double *fluid, *whole, *intensity;
    double curve_sd, collective_sd, spot_sd, body_sd, step_sd;
};

/* The means of num_runs assignments: places, comm_s (num_runs, num_comms), comp_s, num (num_runs). The rest is what
 * `ls_prepare` makes of them, for each lattice in turn: the distinct places, which of them each (run, collective) is,
 * their precision, and the Cholesky factor of their covariance. */
struct ls_record {
    int64_t num_runs;
    const int64_t *places;
    const double *comm_s, *comp_s, *num;
    double sigma;
    int64_t *num_seen, *seen, *index;
    double *precision, *factor;
};

/* Surrogates from constants of the wire and the computations: use, pace (num_lattices, most_places), comm_s (num_comms,
 * most_places), under (num_lattices, most_places, num_kernels), alone (num_kernels), rest (num_comms, most_places): what
 * the curve of the computations misses, as logarithms to be added up; fronts (num_lattices, most_places) hold the
 * candidates in order of speed, num_front how many. */
struct ls_surrogate {
    double *use, *pace, *comm_s, *under, *alone, *rest;
    int64_t *fronts, *num_front;
};
/* The interface, in the order of a search; what each does stands where it is. */
API int ls_version(void);
API int ls_prepare(const struct ls_group *group, struct ls_record *record);
API int ls_fit_wire(const struct ls_group *group, const struct ls_record *record, const double *mean,
                    const double *prior_sd, int64_t num_steps, double *params, double *covariance, double *cost);
API int ls_wires(const struct ls_group *group, const struct ls_record *record, const double *params,
                 struct ls_surrogate *surrogate);
API int ls_fit_body(const struct ls_group *group, const struct ls_record *record, const struct ls_surrogate *surrogate,
                    const int64_t *sms, int64_t num_sms, const double *mean, const double *prior_sd, int64_t num_steps,
                    double *params, double *covariance, double *cost);
API int ls_computations(const struct ls_group *group, const struct ls_record *record, int64_t sm, const double *params,
                        struct ls_surrogate *surrogate);
API int ls_times(const struct ls_group *group, const struct ls_surrogate *surrogate, const int64_t *places, int64_t num,
                 double *comm_s, double *comp_s);
API int ls_best(const struct ls_group *group, const struct ls_surrogate *surrogate, const uint8_t *excluded,
                const int64_t *starts, int64_t num_starts, double doubt, int64_t *places, double *best);
API int ls_waiting(const double *kernels, int64_t num_kernels, const double *lost, const double *alone,
                   const double *slower, int64_t num_assignments, int64_t num_comms, int64_t num_draws, double *ended);

/* Small things. ---------------------------------------------------------------------------------------------------- */

static inline double larger(double a, double b) { return a > b ? a : b; }
static inline double smaller(double a, double b) { return a < b ? a : b; }

static inline double sum_of(const double *values, int64_t num) {
    double sum = 0;
    for (int64_t d = 0; d < num; d++) sum += values[d];
    return sum;
}

/* The expected larger of two uncertain times. */
static inline double rounded_max(double comm_s, double comp_s, double doubt) {
    double blur = doubt * larger(comm_s, comp_s), apart = comm_s - comp_s;
    return 0.5 * (comm_s + comp_s + sqrt(apart * apart + 0.64 * blur * blur));
}

static inline double variance_of(const struct ls_record *record, int64_t run) {
    return record->sigma * record->sigma / record->num[run] + LEAST_VARIANCE;
}

/* lagom_search_fit.c ----------------------------------------------------------------------------------------------- */

/* Rows to be predicted from parameters that are believed to be about `mean`. */
struct problem {
    int64_t num_rows, num_params;
    const double *observed, *sd; /* of the rows */
    const double *mean, *prior_sd;
    const void *model;
    /* Values of the rows; where `jacobian` (rows, params) is given, that as well. */
    void (*predict)(const void *model, const double *params, double *values, double *jacobian);
};

/* The Cholesky factor of a symmetric positive definite matrix, n by n, lower triangle, in place; and with it A x = b. */
void factorise(double *a, int64_t n);
void solve(const double *factor, int64_t n, double *x);
double *fit_scratch(int64_t rows, int64_t n);
void fit(const struct problem *p, int64_t num_steps, double *params, double *covariance, double *cost, double *scratch);

/* lagom_search_wire.c: use, pace and comm_s of a surrogate, by the curve alone. ------------------------------------- */

int draw_wires(const struct ls_group *group, const double *params, struct ls_surrogate *surrogate);

/* lagom_search_body.c: under and alone of a surrogate. -------------------------------------------------------------- */

void draw_kernels(const struct ls_group *group, int64_t sm, const double *params, struct ls_surrogate *surrogate);

/* Whole assignments. ----------------------------------------------------------------------------------------------- */

/* Where the computations are: kernel i, the share of it that is left, and the time so far. */
struct progress {
    int64_t i;
    double left, time_s;
};

static inline void advance(struct progress *now, const double *under, double comm_s, int64_t num_kernels) {
    while (now->i < num_kernels) {
        double rest_s = now->left * under[now->i];
        if (comm_s < rest_s) {
            now->left -= comm_s / under[now->i];
            now->time_s += comm_s;
            return;
        }
        comm_s -= rest_s;
        now->i++;
        now->left = 1.0;
        now->time_s += rest_s;
    }
}

/* What surrogates and the search on them look at all the time. */
struct outlook {
    const struct ls_group *group;
    const struct ls_surrogate *surrogate;
    int64_t num_comms, num_kernels, most;
    double doubt;
};

static inline struct outlook outlook_of(const struct ls_group *group, const struct ls_surrogate *surrogate, double doubt) {
    return (struct outlook){group, surrogate, group->num_comms, group->num_kernels, group->most_places, doubt};
}

static inline double comm_at(const struct outlook *o, int64_t j, int64_t place) {
    return o->surrogate->comm_s[j * o->most + place];
}

static inline const double *under_at(const struct outlook *o, int64_t j, int64_t place) {
    return o->surrogate->under + (o->group->lattice_of[j] * o->most + place) * o->num_kernels;
}

static inline double rest_at(const struct outlook *o, int64_t j, int64_t place) {
    return o->surrogate->rest[j * o->most + place];
}

#endif
