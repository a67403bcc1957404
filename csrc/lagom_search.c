/* liblagom_search.so: the model of the tuner `just_enough`: its two curves, their fits, forecasts and the search on them.
 *
 * What is computed and why: src/lagom_overlap/tune/just_enough (wire.py, victim.py, forecast.py, allocate.py); a second,
 * plain implementation in numpy stands in the tests. Here is only what is worth a compiler: an iteration of tens of
 * groups is planned within one step of training.
 *
 * Pure functions: no state, no threads, no I/O. All arrays are the caller's, row by row without gaps, and valid: only
 * what a computation may produce by itself (not a number, infinite) is met with care. Functions return 0, or -1 where
 * memory is wanting.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { LS_VERSION = 1, NUM_SHARED = 8, NUM_OF_KIND = 4, NUM_BODY = 5, NUM_TRADED = 5, MOST_PAIRS = 4096, NEAR = 8 };
enum { LINK, SATURATE, HALF, LATENCY, SHARP, POWER, FILL, PENALTY };       /* the shared constants of the wire */
enum { SCALE, SHARE, PRESSURE, POLLUTION, HALF_FLIGHT };                    /* the constants of the computations */
static const double SHIFT = 1e-4, LEAST_VARIANCE = 1e-8, LEAST_STEP = 1e-6, LEAST_GAIN = 1e-3, AWFUL = 1e30;
static const double NEAR_FRONT = 1.004;

/* Places of one or several collectives; `near` and `near_root` are (num_places, num_places): exp(-d^2 / 2), and its root
 * of degree num_comms, of the distances between places. */
struct ls_lattice {
    int64_t num_places;
    const double *channels, *chunk_bytes;
    const int64_t *kind;
    const double *near, *near_root;
};

/* A group: what does not change during its search. fluid, whole: (num_sm_counts, most_channels + 1, num_kernels). */
struct ls_group {
    int64_t num_comms, num_lattices, most_places, num_kernels, most_channels, knows_grid, num_kinds;
    const struct ls_lattice *lattices;
    const int64_t *lattice_of;
    const double *wire_bytes;
    const double *fluid, *whole, *intensity;
    double curve_sd, collective_sd, spot_sd, body_sd;
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

/* Forecasts from constants of the wire and the computations: use (num_lattices, most_places), comm_s (num_comms,
 * most_places), under (num_lattices, most_places, num_kernels), alone (num_kernels), weights (num_runs); fronts
 * (num_lattices, most_places) hold the candidates in order of speed, num_front how many. */
struct ls_forecast {
    double *use, *comm_s, *under, *alone, *weights;
    int64_t *fronts, *num_front;
};

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

/* The expected larger of two uncertain times. */
static double rounded_max(double comm_s, double comp_s, double doubt) {
    double blur = doubt * larger(comm_s, comp_s), apart = comm_s - comp_s;
    return 0.5 * (comm_s + comp_s + sqrt(apart * apart + 0.64 * blur * blur));
}

/* Symmetric positive definite matrices, n by n, lower triangles. --------------------------------------------------- */

static void factorise(double *a, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        double *row = a + k * n;
        for (int64_t j = 0; j < k; j++) {
            const double *other = a + j * n;
            double sum = row[j];
            for (int64_t i = 0; i < j; i++) sum -= row[i] * other[i];
            row[j] = sum / other[j];
        }
        double pivot = row[k];
        for (int64_t i = 0; i < k; i++) pivot -= row[i] * row[i];
        row[k] = sqrt(larger(pivot, 1e-300));
    }
}

static void solve(const double *factor, int64_t n, double *x) {
    for (int64_t k = 0; k < n; k++) {
        for (int64_t i = 0; i < k; i++) x[k] -= factor[k * n + i] * x[i];
        x[k] /= factor[k * n + k];
    }
    for (int64_t k = n - 1; k >= 0; k--) {
        x[k] /= factor[k * n + k];
        for (int64_t i = 0; i < k; i++) x[i] -= factor[k * n + i] * x[k];
    }
}

/* Damped Gauss-Newton steps to the maximum a posteriori. ------------------------------------------------------------ */

struct problem {
    int64_t num_rows, num_params;
    const double *observed, *sd; /* of the rows */
    const double *mean, *prior_sd;
    const void *model;
    /* Values of the rows; where `jacobian` (rows, params) is given, that as well. */
    void (*predict)(const void *model, const double *params, double *values, double *jacobian);
};

static double cost_of(const struct problem *p, const double *params, const double *values) {
    double cost = 0.0;
    for (int64_t i = 0; i < p->num_rows; i++) {
        double error = (values[i] - p->observed[i]) / p->sd[i];
        cost += error * error;
    }
    for (int64_t i = 0; i < p->num_params; i++) {
        double away = (params[i] - p->mean[i]) / p->prior_sd[i];
        cost += away * away;
    }
    return isfinite(cost) ? 0.5 * cost : AWFUL;
}

/* H = J^T J + prior, slope = J^T error + prior. */
static void normal_equations(const struct problem *p, const double *params, const double *values,
                             const double *jacobian, double *normal, double *slope) {
    int64_t n = p->num_params;
    memset(normal, 0, (size_t)(n * n) * sizeof *normal);
    for (int64_t a = 0; a < n; a++) {
        double precision = 1 / (p->prior_sd[a] * p->prior_sd[a]);
        normal[a * n + a] = precision;
        slope[a] = (params[a] - p->mean[a]) * precision;
    }
    for (int64_t i = 0; i < p->num_rows; i++) {
        const double *row = jacobian + i * n;
        double weight = 1 / (p->sd[i] * p->sd[i]), error = values[i] - p->observed[i];
        for (int64_t a = 0; a < n; a++) {
            double weighted = row[a] * weight;
            if (weighted == 0) continue;
            slope[a] += weighted * error;
            for (int64_t b = 0; b <= a; b++) normal[a * n + b] += weighted * row[b];
        }
    }
}

/* From `params`, in place; the covariance (params, params) and the cost at the end; returns the predictions made. */
static int64_t fit(const struct problem *p, int64_t num_steps, double *params, double *covariance, double *cost,
                   double *scratch) {
    int64_t n = p->num_params, rows = p->num_rows, num_predictions = 1;
    double *values = scratch, *tried_values = values + rows, *jacobian = tried_values + rows;
    double *normal = jacobian + rows * n, *ridged = normal + n * n, *slope = ridged + n * n, *step = slope + n;
    double *tried = step + n, damping = 1e-3;
    p->predict(p->model, params, values, jacobian);
    *cost = cost_of(p, params, values);
    normal_equations(p, params, values, jacobian, normal, slope);
    for (int64_t round = 0; round < num_steps; round++) {
        memcpy(ridged, normal, (size_t)(n * n) * sizeof *normal);
        for (int64_t a = 0; a < n; a++) ridged[a * n + a] *= 1 + damping;
        factorise(ridged, n);
        for (int64_t a = 0; a < n; a++) step[a] = -slope[a];
        solve(ridged, n, step);
        for (int64_t a = 0; a < n; a++) {
            double most = 2 * p->prior_sd[a];
            tried[a] = params[a] + smaller(larger(step[a], -most), most);
        }
        p->predict(p->model, tried, tried_values, NULL);
        num_predictions++;
        double tried_cost = cost_of(p, tried, tried_values);
        double gain = (*cost - tried_cost) / (*cost + 1e-9);
        if (tried_cost < *cost) {
            memcpy(params, tried, (size_t)n * sizeof *params);
            p->predict(p->model, params, values, jacobian);
            num_predictions++;
            *cost = tried_cost;
            normal_equations(p, params, values, jacobian, normal, slope);
            damping /= 5;
        } else {
            damping *= 10;
        }
        if (fabs(gain) < LEAST_GAIN) break;
    }
    factorise(normal, n);
    for (int64_t a = 0; a < n; a++) {
        memset(step, 0, (size_t)n * sizeof *step);
        step[a] = 1;
        solve(normal, n, step);
        for (int64_t b = 0; b < n; b++) covariance[b * n + a] = step[b];
    }
    return num_predictions;
}

static double *fit_scratch(int64_t rows, int64_t n) {
    return malloc((size_t)(rows * (n + 2) + 2 * n * n + 3 * n) * sizeof(double));
}

/* The wire. -------------------------------------------------------------------------------------------------------- */

/* The constants of one implementation, exponentials taken. */
struct kind {
    double link, saturate, half, wait_s;
};

struct wire {
    double sharp, power, fill, penalty;
    struct kind *kinds;
};

static int open_wire(struct wire *wire, const double *params, int64_t num_kinds) {
    static const double none[NUM_OF_KIND];
    wire->sharp = exp(params[SHARP]);
    wire->power = exp(params[POWER]);
    wire->fill = exp(params[FILL]);
    wire->penalty = params[PENALTY];
    wire->kinds = malloc((size_t)num_kinds * sizeof *wire->kinds);
    if (!wire->kinds) return -1;
    for (int64_t k = 0; k < num_kinds; k++) {
        const double *own = k ? params + NUM_SHARED + NUM_OF_KIND * (k - 1) : none;
        wire->kinds[k] = (struct kind){
            .link = params[LINK] + own[0],
            .saturate = params[SATURATE] + own[0] - own[1],
            .half = exp(params[HALF] + own[2]),
            .wait_s = exp(params[LATENCY] + own[3]),
        };
    }
    return 0;
}

/* ln R at a place; what its derivatives are made of, where wanted. */
struct rate_parts {
    double filling, soft, missing, per_chunk, half_share;
};

static double log_rate(const struct wire *wire, const struct kind *kind, double channels, double chunk_bytes,
                       struct rate_parts *parts) {
    double relative = kind->half / chunk_bytes;
    double per_chunk = wire->power * log1p(relative);
    double filling = wire->sharp * (log(channels) - kind->saturate - per_chunk);
    double rest = exp(-fabs(filling)), soft = log1p(rest) + larger(-filling, 0.0);
    if (parts) {
        double missing = filling > 0 ? rest / (1 + rest) : 1 / (1 + rest);
        *parts = (struct rate_parts){filling, soft, missing, per_chunk, relative / (1 + relative)};
    }
    return kind->link - soft / wire->sharp - wire->penalty * channels;
}

struct wire_model {
    const struct ls_group *group;
    const struct ls_record *record;
};

static void predict_wire(const void *model, const double *params, double *values, double *jacobian) {
    const struct ls_group *group = ((const struct wire_model *)model)->group;
    const struct ls_record *record = ((const struct wire_model *)model)->record;
    int64_t num_rows = record->num_runs * group->num_comms;
    int64_t num_params = NUM_SHARED + NUM_OF_KIND * (group->num_kinds - 1);
    struct wire wire;
    if (open_wire(&wire, params, group->num_kinds)) {
        for (int64_t row = 0; row < num_rows; row++) values[row] = NAN;
        if (jacobian) memset(jacobian, 0, (size_t)(num_rows * num_params) * sizeof *jacobian);
        return;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t j = row % group->num_comms, place = record->places[row];
        const struct ls_lattice *lattice = &group->lattices[group->lattice_of[j]];
        int64_t number = lattice->kind[place];
        const struct kind *kind = &wire.kinds[number];
        double channels = lattice->channels[place], chunk = lattice->chunk_bytes[place], bytes = group->wire_bytes[j];
        struct rate_parts parts;
        double inverse = exp(-log_rate(&wire, kind, channels, chunk, jacobian ? &parts : NULL));
        double first = wire.fill * smaller(bytes, channels * chunk);
        double moved = (bytes + first) * inverse, time_s = kind->wait_s + moved;
        values[row] = log(time_s);
        if (!jacobian) continue;
        double *slope = jacobian + row * num_params, down = -moved / time_s; /* d ln x / d ln R */
        memset(slope, 0, (size_t)num_params * sizeof *slope);
        slope[LINK] = down;
        slope[SATURATE] = -down * parts.missing;
        slope[HALF] = -down * parts.missing * wire.power * parts.half_share;
        slope[LATENCY] = kind->wait_s / time_s;
        slope[SHARP] = down * (parts.soft + parts.missing * parts.filling) / wire.sharp;
        slope[POWER] = -down * parts.missing * parts.per_chunk;
        slope[FILL] = first * inverse / time_s;
        slope[PENALTY] = -down * channels;
        if (number) {
            double *own = slope + NUM_SHARED + NUM_OF_KIND * (number - 1);
            own[0] = slope[LINK] + slope[SATURATE];
            own[1] = -slope[SATURATE];
            own[2] = slope[HALF];
            own[3] = slope[LATENCY];
        }
    }
    free(wire.kinds);
}

API int ls_version(void) { return LS_VERSION; }

/* The wire's constants from all collectives' times; params holds the start. Adds the predictions made to *work. */
API int ls_fit_wire(const struct ls_group *group, const struct ls_record *record, const double *mean,
                    const double *prior_sd, int64_t num_steps, double *params, double *covariance, double *cost,
                    int64_t *work) {
    int64_t rows = record->num_runs * group->num_comms, n = NUM_SHARED + NUM_OF_KIND * (group->num_kinds - 1);
    double *scratch = fit_scratch(rows, n), *observed = malloc((size_t)(2 * rows) * sizeof *observed);
    if (scratch && observed) {
        double *sd = observed + rows;
        for (int64_t row = 0; row < rows; row++) {
            observed[row] = log(record->comm_s[row]);
            sd[row] = sqrt(record->sigma * record->sigma / record->num[row / group->num_comms] +
                           group->curve_sd * group->curve_sd / 2);
        }
        struct wire_model model = {group, record};
        struct problem problem = {rows, n, observed, sd, mean, prior_sd, &model, predict_wire};
        *work += rows * fit(&problem, num_steps, params, covariance, cost, scratch);
    }
    int status = scratch && observed ? 0 : -1;
    free(scratch);
    free(observed);
    return status;
}

/* What the curve misses, smoothed over the lattice. ---------------------------------------------------------------- */

/* Offsets into the record's arrays of a lattice: every lattice has room for its places, or all measurements. */
static int64_t room(const struct ls_group *group, const struct ls_record *record, int64_t lattice) {
    return smaller(group->lattices[lattice].num_places, record->num_runs * group->num_comms);
}

static double variance_of(const struct ls_record *record, int64_t run) {
    return record->sigma * record->sigma / record->num[run] + LEAST_VARIANCE;
}

/* Distinct places, their precisions and the factor of their covariance, which no constants of a fit change. */
API int ls_prepare(const struct ls_group *group, struct ls_record *record, int64_t *work) {
    int64_t *number = malloc((size_t)group->most_places * sizeof *number);
    if (!number) return -1;
    int64_t *seen = record->seen;
    double *precision = record->precision, *factor = record->factor;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        int64_t num_seen = 0;
        for (int64_t p = 0; p < lattice->num_places; p++) number[p] = -1;
        for (int64_t row = 0; row < record->num_runs * group->num_comms; row++) {
            if (group->lattice_of[row % group->num_comms] != m) continue;
            int64_t place = record->places[row];
            if (number[place] < 0) {
                number[place] = num_seen;
                precision[num_seen] = 0;
                seen[num_seen++] = place;
            }
            record->index[row] = number[place];
            precision[number[place]] +=
                1 / (variance_of(record, row / group->num_comms) + group->spot_sd * group->spot_sd);
        }
        double amplitude = group->curve_sd * group->curve_sd;
        for (int64_t a = 0; a < num_seen; a++) {
            const double *near = lattice->near + seen[a] * lattice->num_places;
            for (int64_t b = 0; b <= a; b++) factor[a * num_seen + b] = amplitude * near[seen[b]];
            factor[a * num_seen + a] += 1 / precision[a];
        }
        factorise(factor, num_seen);
        *work += num_seen * num_seen * num_seen / 300;
        record->num_seen[m] = num_seen;
        int64_t space = room(group, record, m);
        seen += space, precision += space, factor += space * space;
    }
    free(number);
    return 0;
}

/* From rest (rows): for each lattice the coefficients (room) of the smooth rest, and its value at the rows. */
static void smooth(const struct ls_group *group, const struct ls_record *record, const double *rest,
                   double *coefficients, double *at_rows) {
    int64_t num_rows = record->num_runs * group->num_comms;
    const int64_t *seen = record->seen;
    const double *precision = record->precision, *factor = record->factor;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        int64_t num_seen = record->num_seen[m], space = room(group, record, m);
        double amplitude = group->curve_sd * group->curve_sd;
        memset(coefficients, 0, (size_t)space * sizeof *coefficients);
        for (int64_t row = 0; row < num_rows; row++) {
            if (group->lattice_of[row % group->num_comms] != m) continue;
            double variance = variance_of(record, row / group->num_comms) + group->spot_sd * group->spot_sd;
            coefficients[record->index[row]] += rest[row] / variance;
        }
        for (int64_t a = 0; a < num_seen; a++) coefficients[a] /= precision[a];
        solve(factor, num_seen, coefficients);
        for (int64_t a = 0; a < num_seen; a++) coefficients[a] *= amplitude;
        for (int64_t row = 0; row < num_rows; row++) {
            if (group->lattice_of[row % group->num_comms] != m) continue;
            const double *near = lattice->near + record->places[row] * lattice->num_places;
            double value = 0;
            for (int64_t a = 0; a < num_seen; a++) value += near[seen[a]] * coefficients[a];
            at_rows[row] = value;
        }
        coefficients += space, seen += space, precision += space, factor += space * space;
    }
}

static void spread_smooth(const struct ls_lattice *lattice, const int64_t *seen, int64_t num_seen,
                          const double *coefficients, double *target) {
    memset(target, 0, (size_t)lattice->num_places * sizeof *target);
    for (int64_t a = 0; a < num_seen; a++) {
        const double *near = lattice->near + seen[a] * lattice->num_places;
        for (int64_t p = 0; p < lattice->num_places; p++) target[p] += near[p] * coefficients[a];
    }
}

static void raw_curves(const struct ls_group *group, const struct wire *wire, struct ls_forecast *forecast) {
    int64_t most = group->most_places;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        double *rate = forecast->use + m * most, largest = 0;
        for (int64_t p = 0; p < lattice->num_places; p++) {
            const struct kind *kind = &wire->kinds[lattice->kind[p]];
            rate[p] = exp(log_rate(wire, kind, lattice->channels[p], lattice->chunk_bytes[p], NULL));
            largest = larger(largest, rate[p]);
        }
        for (int64_t j = 0; j < group->num_comms; j++) {
            if (group->lattice_of[j] != m) continue;
            double *comm_s = forecast->comm_s + j * most, bytes = group->wire_bytes[j];
            for (int64_t p = 0; p < lattice->num_places; p++) {
                double first = wire->fill * smaller(bytes, lattice->channels[p] * lattice->chunk_bytes[p]);
                comm_s[p] = wire->kinds[lattice->kind[p]].wait_s + (bytes + first) / rate[p];
            }
        }
        for (int64_t p = 0; p < lattice->num_places; p++) rate[p] /= largest;
    }
}

/* use and comm_s of the forecast: the curve, the smooth rest of all, the collective's own factor, what one spot showed. */
API int ls_wires(const struct ls_group *group, const struct ls_record *record, const double *params,
                 struct ls_forecast *forecast, int64_t *work) {
    int64_t num_comms = group->num_comms, num_rows = record->num_runs * num_comms, space = 0, most = group->most_places;
    for (int64_t m = 0; m < group->num_lattices; m++) space += room(group, record, m);
    struct wire wire = {.kinds = NULL};
    double *scratch = malloc((size_t)(3 * num_rows + space + num_comms + most) * sizeof *scratch);
    if (!scratch || open_wire(&wire, params, group->num_kinds)) {
        free(scratch);
        return -1;
    }
    double *rest = scratch, *left = rest + num_rows, *smoothed = left + num_rows, *coefficients = smoothed + num_rows;
    double *own = coefficients + space, *whole = own + num_comms;
    raw_curves(group, &wire, forecast);
    free(wire.kinds);
    double mean_variance = 0;
    for (int64_t d = 0; d < record->num_runs; d++) mean_variance += variance_of(record, d) / (double)record->num_runs;
    for (int64_t row = 0; row < num_rows; row++) {
        rest[row] = log(record->comm_s[row] / forecast->comm_s[row % num_comms * most + record->places[row]]);
    }
    memset(own, 0, (size_t)num_comms * sizeof *own);
    double shrink = (double)record->num_runs +
                    (mean_variance + group->spot_sd * group->spot_sd) / (group->collective_sd * group->collective_sd);
    for (int round = 0; round < 2; round++) {
        for (int64_t row = 0; row < num_rows; row++) left[row] = rest[row] - own[row % num_comms];
        smooth(group, record, left, coefficients, smoothed);
        memset(own, 0, (size_t)num_comms * sizeof *own);
        for (int64_t row = 0; row < num_rows; row++) own[row % num_comms] += (rest[row] - smoothed[row]) / shrink;
    }
    const int64_t *seen = record->seen;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        spread_smooth(lattice, seen, record->num_seen[m], coefficients, whole);
        for (int64_t p = 0; p < lattice->num_places; p++) whole[p] = exp(whole[p]);
        for (int64_t j = 0; j < num_comms; j++) {
            if (group->lattice_of[j] != m) continue;
            double *comm_s = forecast->comm_s + j * most, factor = exp(own[j]);
            for (int64_t p = 0; p < lattice->num_places; p++) comm_s[p] *= whole[p] * factor;
        }
        seen += room(group, record, m), coefficients += room(group, record, m);
    }
    for (int64_t j = 0; j < num_comms; j++) {
        for (int64_t d = 0; d < record->num_runs; d++) { /* each place once: at its first run, over all its runs */
            int64_t place = record->places[d * num_comms + j];
            double precision = 1 / (group->spot_sd * group->spot_sd), weighted = 0;
            bool is_first = true;
            for (int64_t other = 0; other < record->num_runs; other++) {
                int64_t row = other * num_comms + j;
                if (record->places[row] != place) continue;
                is_first = is_first && other >= d;
                precision += 1 / variance_of(record, other);
                weighted += (rest[row] - own[j] - smoothed[row]) / variance_of(record, other);
            }
            if (is_first) forecast->comm_s[j * most + place] *= exp(weighted / precision);
        }
    }
    free(scratch);
    *work += group->num_lattices * most + num_comms * most / 8;
    return 0;
}

/* The computations. ------------------------------------------------------------------------------------------------ */

/* The constants of the computations, exponentials taken; waves of one SM count. */
struct body {
    double scale, mix, pressure, pollution, half;
    const double *fluid, *whole, *intensity;
    int64_t num_kernels;
    bool knows_grid;
};

static struct body body_of(const struct ls_group *group, int64_t sm, const double *params) {
    int64_t table = (group->most_channels + 1) * group->num_kernels;
    double share = params[SHARE];
    return (struct body){
        .scale = exp(params[SCALE]),
        .mix = group->knows_grid ? larger(0.0, smaller(1.0, share)) : exp(share),
        .pressure = exp(params[PRESSURE]),
        .pollution = exp(params[POLLUTION]),
        .half = exp(params[HALF_FLIGHT]),
        .fluid = group->fluid + sm * table,
        .whole = group->whole + sm * table,
        .intensity = group->intensity,
        .num_kernels = group->num_kernels,
        .knows_grid = group->knows_grid != 0,
    };
}

/* Kernel i with so many channels taken away, nothing else beside it. */
static double solo_s(const struct body *body, int64_t channels, int64_t i) {
    int64_t at = channels * body->num_kernels + i;
    double waves = body->knows_grid ? body->fluid[at] * (1 - body->mix) + body->whole[at] * body->mix
                                    : 1 + body->mix * body->fluid[at];
    return body->scale * waves;
}

/* What runs beside a collective: its channels, pressure on memory, pollution of the cache. */
struct beside {
    int64_t channels;
    double pressed, polluted;
};

static struct beside beside_of(const struct body *body, double channels, double chunk_bytes, double use) {
    double flight = channels * chunk_bytes;
    return (struct beside){(int64_t)channels, body->pressure * use / (2 - use),
                           body->pollution * flight / (flight + body->half)};
}

static double kernel_s(const struct body *body, const struct beside *beside, int64_t i) {
    return solo_s(body, beside->channels, i) * (1 + beside->pressed * body->intensity[i] + beside->polluted);
}

/* Where the computations are: kernel i, the share of it that is left, and the time so far. */
struct progress {
    int64_t i;
    double left, time_s;
};

struct body_model {
    const struct ls_group *group;
    const struct ls_record *record;
    const struct ls_forecast *forecast;
    int64_t sm;
};

static double finish_log(const struct body_model *model, const struct body *body, int64_t run) {
    const struct ls_group *group = model->group;
    const int64_t *places = model->record->places + run * group->num_comms;
    struct progress now = {0, 1.0, 0.0};
    for (int64_t j = 0; j < group->num_comms && now.i < body->num_kernels; j++) {
        int64_t m = group->lattice_of[j], place = places[j];
        const struct ls_lattice *lattice = &group->lattices[m];
        double comm_s = model->forecast->comm_s[j * group->most_places + place];
        struct beside beside = beside_of(body, lattice->channels[place], lattice->chunk_bytes[place],
                                         model->forecast->use[m * group->most_places + place]);
        while (now.i < body->num_kernels) {
            double whole_s = kernel_s(body, &beside, now.i), rest_s = now.left * whole_s;
            if (comm_s < rest_s) {
                now.left -= comm_s / whole_s;
                now.time_s += comm_s;
                break;
            }
            comm_s -= rest_s;
            now = (struct progress){now.i + 1, 1.0, now.time_s + rest_s};
        }
    }
    for (; now.i < body->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * solo_s(body, 0, now.i);
    return log(now.time_s);
}

static void predict_body(const void *context, const double *params, double *values, double *jacobian) {
    const struct body_model *model = context;
    int64_t num_runs = model->record->num_runs;
    struct body body = body_of(model->group, model->sm, params);
    for (int64_t d = 0; d < num_runs; d++) values[d] = finish_log(model, &body, d);
    for (int64_t a = 0; jacobian && a < NUM_BODY; a++) {
        double shifted[NUM_BODY];
        memcpy(shifted, params, sizeof shifted);
        shifted[a] += SHIFT;
        body = body_of(model->group, model->sm, shifted);
        for (int64_t d = 0; d < num_runs; d++) {
            jacobian[d * NUM_BODY + a] = (finish_log(model, &body, d) - values[d]) / SHIFT;
        }
    }
}

/* The constants of the computations for each SM count in question, beside the collectives as `forecast` has them. */
API int ls_fit_body(const struct ls_group *group, const struct ls_record *record, const struct ls_forecast *forecast,
                    const int64_t *sms, int64_t num_sms, const double *mean, const double *prior_sd, int64_t num_steps,
                    double *params, double *covariance, double *cost, int64_t *work) {
    int64_t rows = record->num_runs;
    double *scratch = fit_scratch(rows, NUM_BODY), *observed = malloc((size_t)(2 * rows) * sizeof *observed);
    if (scratch && observed) {
        double *sd = observed + rows;
        for (int64_t d = 0; d < rows; d++) {
            observed[d] = log(record->comp_s[d]);
            sd[d] = sqrt(record->sigma * record->sigma / record->num[d] + group->body_sd * group->body_sd);
        }
        for (int64_t s = 0; s < num_sms; s++) {
            struct body_model model = {group, record, forecast, sms[s]};
            struct problem problem = {rows, NUM_BODY, observed, sd, mean, prior_sd, &model, predict_body};
            int64_t num = fit(&problem, num_steps, params + s * NUM_BODY, covariance + s * NUM_BODY * NUM_BODY,
                              cost + s, scratch);
            *work += num * rows * (group->num_comms + group->num_kernels) / 4;
        }
    }
    int status = scratch && observed ? 0 : -1;
    free(scratch);
    free(observed);
    return status;
}

/* Forecasts of whole assignments. ---------------------------------------------------------------------------------- */

/* What the search below looks at all the time. */
struct outlook {
    const struct ls_group *group;
    const struct ls_record *record;
    const struct ls_forecast *forecast;
    int64_t num_comms, num_kernels, num_runs, most;
    double doubt;
    int64_t work;
};

static struct outlook outlook_of(const struct ls_group *group, const struct ls_record *record,
                                 const struct ls_forecast *forecast, double doubt) {
    return (struct outlook){group,  record,          forecast, group->num_comms, group->num_kernels, record->num_runs,
                            group->most_places, doubt, 0};
}

static double comm_at(const struct outlook *o, int64_t j, int64_t place) {
    return o->forecast->comm_s[j * o->most + place];
}

static const double *under_at(const struct outlook *o, int64_t j, int64_t place) {
    return o->forecast->under + (o->group->lattice_of[j] * o->most + place) * o->num_kernels;
}

static void advance(struct progress *now, const double *under, double comm_s, int64_t num_kernels) {
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

/* The computations' end if from collective j on all run at these places. */
static double finish_s(const struct outlook *o, struct progress now, const int64_t *places, int64_t j) {
    for (; j < o->num_comms && now.i < o->num_kernels; j++) {
        advance(&now, under_at(o, j, places[j]), comm_at(o, j, places[j]), o->num_kernels);
    }
    for (; now.i < o->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * o->forecast->alone[now.i];
    return now.time_s;
}

/* How alike run d and place p of collective j are. */
static double alike(const struct outlook *o, int64_t d, int64_t j, int64_t place) {
    const struct ls_lattice *lattice = &o->group->lattices[o->group->lattice_of[j]];
    return lattice->near_root[o->record->places[d * o->num_comms + j] * lattice->num_places + place];
}

/* weights x likeness of the assignment to each run. */
static void likeness(const struct outlook *o, const int64_t *places, double *weighted) {
    for (int64_t d = 0; d < o->num_runs; d++) {
        double product = o->forecast->weights[d];
        for (int64_t j = 0; j < o->num_comms; j++) product *= alike(o, d, j, places[j]);
        weighted[d] = product;
    }
}

static double sum_of(const double *values, int64_t num) {
    double sum = 0;
    for (int64_t d = 0; d < num; d++) sum += values[d];
    return sum;
}

static double total_comm_s(const struct outlook *o, const int64_t *places) {
    double sum = 0;
    for (int64_t j = 0; j < o->num_comms; j++) sum += comm_at(o, j, places[j]);
    return sum;
}

static void times_of(const struct outlook *o, const int64_t *places, double *weighted, double *comm_s, double *comp_s) {
    struct progress start = {0, 1.0, 0.0};
    likeness(o, places, weighted);
    *comm_s = total_comm_s(o, places);
    *comp_s = finish_s(o, start, places, 0) * exp(sum_of(weighted, o->num_runs));
}

/* X and Y of assignments (num, num_comms). */
API int ls_times(const struct ls_group *group, const struct ls_record *record, const struct ls_forecast *forecast,
                 const int64_t *places, int64_t num, double *comm_s, double *comp_s) {
    struct outlook o = outlook_of(group, record, forecast, 0.0);
    double *weighted = malloc((size_t)(record->num_runs + 1) * sizeof *weighted);
    if (!weighted) return -1;
    for (int64_t a = 0; a < num; a++) times_of(&o, places + a * o.num_comms, weighted, comm_s + a, comp_s + a);
    free(weighted);
    return 0;
}

struct ranked {
    double speed, harm;
    int64_t place;
};

static int by_speed(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->speed != y->speed) return x->speed < y->speed ? -1 : 1;
    if (x->harm != y->harm) return x->harm < y->harm ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

/* The places that no other beats in speed and in harmlessness, nearly; the fastest first. */
static int find_fronts(const struct ls_group *group, struct ls_forecast *forecast) {
    struct ranked *ranked = malloc((size_t)group->most_places * sizeof *ranked);
    if (!ranked) return -1;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        int64_t first = 0, num_places = group->lattices[m].num_places, num = 0;
        while (group->lattice_of[first] != m) first++;
        for (int64_t p = 0; p < num_places; p++) {
            const double *under = forecast->under + (m * group->most_places + p) * group->num_kernels;
            ranked[p] = (struct ranked){forecast->comm_s[first * group->most_places + p],
                                        sum_of(under, group->num_kernels), p};
        }
        qsort(ranked, (size_t)num_places, sizeof *ranked, by_speed);
        double least = INFINITY;
        int64_t *front = forecast->fronts + m * group->most_places;
        for (int64_t p = 0; p < num_places; p++) {
            if (ranked[p].harm <= least * NEAR_FRONT) front[num++] = ranked[p].place;
            least = smaller(least, ranked[p].harm);
        }
        forecast->num_front[m] = num;
    }
    free(ranked);
    return 0;
}

/* The rest of a forecast whose wires are known (`ls_wires`): the computations under one SM count and its constants, what
 * their curve misses, and the candidates. */
API int ls_computations(const struct ls_group *group, const struct ls_record *record, int64_t sm, const double *params,
                        struct ls_forecast *forecast, int64_t *work) {
    struct body body = body_of(group, sm, params);
    int64_t num_kernels = group->num_kernels, num_runs = record->num_runs;
    for (int64_t i = 0; i < num_kernels; i++) forecast->alone[i] = solo_s(&body, 0, i);
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        for (int64_t p = 0; p < lattice->num_places; p++) {
            struct beside beside = beside_of(&body, lattice->channels[p], lattice->chunk_bytes[p],
                                             forecast->use[m * group->most_places + p]);
            double *under = forecast->under + (m * group->most_places + p) * num_kernels;
            for (int64_t i = 0; i < num_kernels; i++) under[i] = kernel_s(&body, &beside, i);
        }
    }
    struct outlook o = outlook_of(group, record, forecast, 0.0);
    struct progress start = {0, 1.0, 0.0};
    double *cover = malloc((size_t)(num_runs * num_runs + num_runs) * sizeof *cover), *rest = forecast->weights;
    if (!cover) return -1;
    double amplitude = group->body_sd * group->body_sd, *row = cover + num_runs * num_runs;
    for (int64_t d = 0; d < num_runs; d++) forecast->weights[d] = 1.0; /* so that `likeness` is the likeness alone */
    for (int64_t d = 0; d < num_runs; d++) {
        likeness(&o, record->places + d * group->num_comms, row);
        for (int64_t other = 0; other < num_runs; other++) cover[d * num_runs + other] = amplitude * row[other];
        cover[d * num_runs + d] += variance_of(record, d);
    }
    for (int64_t d = 0; d < num_runs; d++) {
        rest[d] = log(record->comp_s[d] / finish_s(&o, start, record->places + d * group->num_comms, 0));
    }
    factorise(cover, num_runs);
    solve(cover, num_runs, rest);
    for (int64_t d = 0; d < num_runs; d++) forecast->weights[d] *= amplitude;
    free(cover);
    *work += group->num_lattices * group->most_places * num_kernels / 16 + num_runs * num_runs * group->num_comms / 16;
    return find_fronts(group, forecast);
}

/* The best assignment on a forecast. ------------------------------------------------------------------------------- */

/* Candidates of every collective, the fastest first: numbers [starts[j], starts[j + 1]) are collective j's. What the
 * search reads of each lies together: its place, its x, how alike it is to each run (num_runs), T (num_kernels). */
struct candidates {
    int64_t *places, *starts;
    double *comm_s, *alike, *under;
};

static void sort_by_speed(const struct outlook *o, int64_t j, int64_t *places, int64_t num) {
    for (int64_t a = 1; a < num; a++) { /* nearly sorted already */
        int64_t place = places[a], b = a;
        double speed = comm_at(o, j, place);
        for (; b > 0 && comm_at(o, j, places[b - 1]) > speed; b--) places[b] = places[b - 1];
        places[b] = place;
    }
}

/* Also where a collective has none; what is not allowed but begun with gets a number of its own by `number_of`. */
static int open_candidates(const struct outlook *o, const uint8_t *barred, struct candidates *c) {
    int64_t n = o->num_comms, most = 0;
    for (int64_t j = 0; j < n; j++) most += o->forecast->num_front[o->group->lattice_of[j]] + 1;
    c->places = malloc((size_t)(most + n + 1) * sizeof *c->places);
    c->comm_s = malloc((size_t)(most * (1 + o->num_runs + o->num_kernels)) * sizeof *c->comm_s);
    if (!c->places || !c->comm_s) return -1;
    c->starts = c->places + most;
    c->alike = c->comm_s + most;
    c->under = c->alike + most * o->num_runs;
    c->starts[0] = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t m = o->group->lattice_of[j], *places = c->places + c->starts[j], num = 0;
        for (int64_t a = 0; a < o->forecast->num_front[m]; a++) {
            int64_t place = o->forecast->fronts[m * o->most + a];
            if (!barred || !barred[j * o->most + place]) places[num++] = place;
        }
        sort_by_speed(o, j, places, num);
        places[num++] = -1; /* room for a start that is no candidate */
        c->starts[j + 1] = c->starts[j] + num;
    }
    return 0;
}

static void describe(const struct outlook *o, const struct candidates *c, int64_t j, int64_t number) {
    int64_t place = c->places[number];
    c->comm_s[number] = comm_at(o, j, place);
    for (int64_t d = 0; d < o->num_runs; d++) c->alike[number * o->num_runs + d] = alike(o, d, j, place);
    memcpy(c->under + number * o->num_kernels, under_at(o, j, place), (size_t)o->num_kernels * sizeof *c->under);
}

/* How many candidates collective j has; the number behind them is the start's. */
static int64_t end_of(const struct candidates *c, int64_t j) { return c->starts[j + 1] - 1; }

static int64_t number_of(const struct outlook *o, const struct candidates *c, int64_t j, int64_t place) {
    for (int64_t a = c->starts[j]; a < end_of(c, j); a++) {
        if (c->places[a] == place) return a;
    }
    c->places[end_of(c, j)] = place;
    describe(o, c, j, end_of(c, j));
    return end_of(c, j);
}

/* The computations' progress before collective `end`, if those before it run as chosen. */
static struct progress before(const struct outlook *o, const struct candidates *c, const int64_t *chosen, int64_t end) {
    struct progress now = {0, 1.0, 0.0};
    for (int64_t j = 0; j < end && now.i < o->num_kernels; j++) {
        advance(&now, c->under + chosen[j] * o->num_kernels, c->comm_s[chosen[j]], o->num_kernels);
    }
    return now;
}

static double end_s(const struct outlook *o, const struct candidates *c, struct progress now, const int64_t *chosen,
                    int64_t j) {
    for (; j < o->num_comms && now.i < o->num_kernels; j++) {
        advance(&now, c->under + chosen[j] * o->num_kernels, c->comm_s[chosen[j]], o->num_kernels);
    }
    for (; now.i < o->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * o->forecast->alone[now.i];
    return now.time_s;
}

/* weights x likeness to each run, collectives i and j left out (-1: none); returns the sum of all x. */
static double without(const struct outlook *o, const struct candidates *c, const int64_t *chosen, int64_t i, int64_t j,
                      double *weighted) {
    double sum = 0;
    memcpy(weighted, o->forecast->weights, (size_t)o->num_runs * sizeof *weighted);
    for (int64_t k = 0; k < o->num_comms; k++) {
        if (k == i || k == j) continue;
        const double *alike = c->alike + chosen[k] * o->num_runs;
        for (int64_t d = 0; d < o->num_runs; d++) weighted[d] *= alike[d];
        sum += c->comm_s[chosen[k]];
    }
    return sum;
}

static double chosen_s(struct outlook *o, const struct candidates *c, const int64_t *chosen, double *weighted) {
    struct progress start = {0, 1.0, 0.0};
    double comm_s = without(o, c, chosen, -1, -1, weighted);
    o->work++;
    return rounded_max(comm_s, end_s(o, c, start, chosen, 0) * exp(sum_of(weighted, o->num_runs)), o->doubt);
}

/* Collective j at each of its candidates, all others as they are; true if a shorter makespan was found. */
static bool vary(struct outlook *o, const struct candidates *c, int64_t *chosen, int64_t j, double *best,
                 double *weighted) {
    struct progress start = before(o, c, chosen, j);
    double others_s = without(o, c, chosen, j, -1, weighted), shortest = *best;
    int64_t kept = chosen[j], found = -1, a = c->starts[j];
    for (; a < end_of(c, j); a++) {
        double comm_s = others_s + c->comm_s[a], exponent = 0;
        if (comm_s >= shortest) break; /* and so are all slower ones */
        for (int64_t d = 0; d < o->num_runs; d++) exponent += weighted[d] * c->alike[a * o->num_runs + d];
        chosen[j] = a;
        double makespan = rounded_max(comm_s, end_s(o, c, start, chosen, j) * exp(exponent), o->doubt);
        if (makespan < shortest) shortest = makespan, found = a;
    }
    o->work += a - c->starts[j] + 1;
    chosen[j] = kept;
    if (found < 0 || !(shortest < *best * (1 - LEAST_STEP))) return false;
    chosen[j] = found;
    *best = shortest;
    return true;
}

/* Up to NUM_TRADED candidates of collective j about the speed of the chosen one: the first, and behind the last. */
static void near_in_speed(const struct candidates *c, int64_t j, int64_t chosen, int64_t *from, int64_t *to) {
    int64_t begin = c->starts[j], end = end_of(c, j), at = begin;
    while (at < end && c->comm_s[at] < c->comm_s[chosen]) at++;
    *from = at - NUM_TRADED / 2 < begin ? begin : at - NUM_TRADED / 2;
    *to = at + NUM_TRADED / 2 + 1 > end ? end : at + NUM_TRADED / 2 + 1;
}

/* The best move of two collectives at once, a few places in speed; true if it shortens the makespan. */
static bool trade(struct outlook *o, const struct candidates *c, int64_t *chosen, double *best, double *weighted) {
    int64_t n = o->num_comms, found[4] = {-1, -1, -1, -1}, from_i, to_i, from_j, to_j;
    double shortest = *best;
    for (int64_t i = 0; i < n; i++) {
        struct progress start = before(o, c, chosen, i);
        near_in_speed(c, i, chosen[i], &from_i, &to_i);
        for (int64_t j = i + 1; j < n && (n <= NEAR || j == i + 1); j++) {
            int64_t kept_i = chosen[i], kept_j = chosen[j];
            double others_s = without(o, c, chosen, i, j, weighted);
            near_in_speed(c, j, kept_j, &from_j, &to_j);
            for (int64_t a = from_i; a < to_i; a++) {
                for (int64_t b = from_j; b < to_j; b++) {
                    double comm_s = others_s + c->comm_s[a] + c->comm_s[b], exponent = 0;
                    const double *alike_i = c->alike + a * o->num_runs, *alike_j = c->alike + b * o->num_runs;
                    if (comm_s >= shortest) break;
                    for (int64_t d = 0; d < o->num_runs; d++) exponent += weighted[d] * alike_i[d] * alike_j[d];
                    chosen[i] = a, chosen[j] = b;
                    double makespan = rounded_max(comm_s, end_s(o, c, start, chosen, i) * exp(exponent), o->doubt);
                    o->work++;
                    if (makespan < shortest) {
                        shortest = makespan;
                        found[0] = i, found[1] = j, found[2] = a, found[3] = b;
                    }
                }
            }
            chosen[i] = kept_i, chosen[j] = kept_j;
        }
    }
    if (found[0] < 0 || !(shortest < *best * (1 - LEAST_STEP))) return false;
    chosen[found[0]] = found[2];
    chosen[found[1]] = found[3];
    *best = shortest;
    return true;
}

static double descend(struct outlook *o, const struct candidates *c, int64_t *chosen, double *weighted) {
    double best = chosen_s(o, c, chosen, weighted);
    int64_t since = 0, j = 0;
    while (since < o->num_comms) {
        since = vary(o, c, chosen, j, &best, weighted) ? 1 : since + 1;
        j = (j + 1) % o->num_comms;
        if (since == o->num_comms && trade(o, c, chosen, &best, weighted)) since = 0;
    }
    return best;
}

static double all_pairs(struct outlook *o, const struct candidates *c, int64_t *chosen, double *weighted) {
    double best = INFINITY;
    int64_t tried[2];
    for (tried[0] = c->starts[0]; tried[0] < end_of(c, 0); tried[0]++) {
        for (tried[1] = c->starts[1]; tried[1] < end_of(c, 1); tried[1]++) {
            if (c->comm_s[tried[0]] + c->comm_s[tried[1]] >= best) break;
            double makespan = chosen_s(o, c, tried, weighted);
            if (makespan < best) best = makespan, memcpy(chosen, tried, sizeof tried);
        }
    }
    return best;
}

/* The best place that is a candidate of all collectives of one lattice, for all of them; infinite if there is none. */
static double best_equal(struct outlook *o, const struct candidates *c, int64_t *chosen, int64_t *tried,
                         double *weighted) {
    double best = INFINITY;
    for (int64_t a = 0; o->group->num_lattices == 1 && a < o->forecast->num_front[0]; a++) {
        int64_t place = o->forecast->fronts[a];
        bool is_allowed = true;
        for (int64_t j = 0; j < o->num_comms && is_allowed; j++) {
            int64_t number = c->starts[j] + a; /* where it is unless the order of speed differs or places are barred */
            if (number >= end_of(c, j) || c->places[number] != place) {
                for (number = c->starts[j]; number < end_of(c, j) && c->places[number] != place; number++) continue;
            }
            tried[j] = number;
            is_allowed = number < end_of(c, j);
        }
        if (!is_allowed) continue;
        double makespan = chosen_s(o, c, tried, weighted);
        if (makespan < best) best = makespan, memcpy(chosen, tried, (size_t)o->num_comms * sizeof *chosen);
    }
    return best;
}

/* Where the expected makespan is shortest: searched from the starts (num_starts, num_comms) and from the best equal
 * places. barred (num_comms, most_places) may be NULL. *best is infinite where there is nothing to start from. */
API int ls_best(const struct ls_group *group, const struct ls_record *record, const struct ls_forecast *forecast,
                const uint8_t *barred, const int64_t *starts, int64_t num_starts, double doubt, int64_t *places,
                double *best, int64_t *work) {
    struct outlook o = outlook_of(group, record, forecast, doubt);
    struct candidates c = {.places = NULL, .comm_s = NULL};
    int64_t n = o.num_comms, *chosen = malloc((size_t)(2 * n) * sizeof *chosen);
    double *weighted = malloc((size_t)(record->num_runs + 1) * sizeof *weighted), makespan;
    int status = chosen && weighted && !open_candidates(&o, barred, &c) ? 0 : -1;
    *best = INFINITY;
    if (!status) {
        for (int64_t j = 0; j < n; j++) {
            for (int64_t a = c.starts[j]; a < end_of(&c, j); a++) describe(&o, &c, j, a);
        }
        int64_t num_pairs = n == 2 ? end_of(&c, 0) * (end_of(&c, 1) - c.starts[1]) : 0;
        if (num_pairs > 0 && num_pairs <= MOST_PAIRS) {
            *best = all_pairs(&o, &c, chosen, weighted);
            for (int64_t j = 0; j < n; j++) places[j] = c.places[chosen[j]];
        } else {
            for (int64_t s = 0; s <= num_starts; s++) {
                if (s == num_starts && !isfinite(best_equal(&o, &c, chosen, chosen + n, weighted))) continue;
                for (int64_t j = 0; s < num_starts && j < n; j++) chosen[j] = number_of(&o, &c, j, starts[s * n + j]);
                makespan = descend(&o, &c, chosen, weighted);
                if (makespan >= *best) continue;
                *best = makespan;
                for (int64_t j = 0; j < n; j++) places[j] = c.places[chosen[j]];
            }
        }
    }
    free(chosen);
    free(weighted);
    free(c.places);
    free(c.comm_s);
    *work += o.work * (n + o.num_kernels + o.num_runs) / 16;
    return status;
}
