/* What the curve of the wire misses, smoothed over the lattice. */
#include "lagom_search.h"

/* Offsets into the record's arrays of a lattice: every lattice has room for its places, or all measurements. */
static int64_t room(const struct ls_group *group, const struct ls_record *record, int64_t lattice) {
    return smaller(group->lattices[lattice].num_places, record->num_runs * group->num_comms);
}

/* Distinct places, their precisions and the factor of their covariance, which no constants of a fit change. */
API int ls_prepare(const struct ls_group *group, struct ls_record *record) {
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

/* use and comm_s of the surrogate: the curve, the smooth rest of all, the collective's own factor, what one spot showed. */
API int ls_wires(const struct ls_group *group, const struct ls_record *record, const double *params,
                 struct ls_surrogate *surrogate) {
    int64_t num_comms = group->num_comms, num_rows = record->num_runs * num_comms, space = 0, most = group->most_places;
    for (int64_t m = 0; m < group->num_lattices; m++) space += room(group, record, m);
    double *scratch = malloc((size_t)(3 * num_rows + space + num_comms + most) * sizeof *scratch);
    if (!scratch || draw_wires(group, params, surrogate)) {
        free(scratch);
        return -1;
    }
    double *rest = scratch, *left = rest + num_rows, *smoothed = left + num_rows, *coefficients = smoothed + num_rows;
    double *own = coefficients + space, *whole = own + num_comms;
    double mean_variance = 0;
    for (int64_t d = 0; d < record->num_runs; d++) mean_variance += variance_of(record, d) / (double)record->num_runs;
    for (int64_t row = 0; row < num_rows; row++) {
        rest[row] = log(record->comm_s[row] / surrogate->comm_s[row % num_comms * most + record->places[row]]);
    }
    memset(own, 0, (size_t)num_comms * sizeof *own);
    double shrink = (double)record->num_runs +
                    (mean_variance + group->spot_sd * group->spot_sd) / (group->collective_sd * group->collective_sd);
    memset(smoothed, 0, (size_t)num_rows * sizeof *smoothed);
    for (int round = 0; round < 2; round++) {
        memset(own, 0, (size_t)num_comms * sizeof *own);
        for (int64_t row = 0; row < num_rows; row++) own[row % num_comms] += (rest[row] - smoothed[row]) / shrink;
        for (int64_t row = 0; row < num_rows; row++) left[row] = rest[row] - own[row % num_comms];
        smooth(group, record, left, coefficients, smoothed);
    }
    const int64_t *seen = record->seen;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        spread_smooth(lattice, seen, record->num_seen[m], coefficients, whole);
        for (int64_t p = 0; p < lattice->num_places; p++) whole[p] = exp(whole[p]);
        for (int64_t j = 0; j < num_comms; j++) {
            if (group->lattice_of[j] != m) continue;
            double *comm_s = surrogate->comm_s + j * most, factor = exp(own[j]);
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
            if (is_first) surrogate->comm_s[j * most + place] *= exp(weighted / precision);
        }
    }
    free(scratch);
    return 0;
}
