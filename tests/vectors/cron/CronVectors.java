import com.cronutils.model.CronType;
import com.cronutils.model.definition.CronDefinitionBuilder;
import com.cronutils.model.time.ExecutionTime;
import com.cronutils.parser.CronParser;
import it.sauronsoftware.cron4j.Predictor;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Instant;
import java.time.ZoneId;
import java.time.ZonedDateTime;
import java.util.Date;
import java.util.TimeZone;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.LongFunction;
import org.quartz.CronExpression;

/** An answer that takes longer than two seconds is left out: cron4j looks at each minute, and for ever at one that never comes.
 *  Lines of "dialect TAB expression TAB zone TAB start" in; the same with the library's next times, or "refused", out. */
public class CronVectors {
    static final int TIMES = 6;

    public static void main(String[] arguments) throws Exception {
        TimeZone.setDefault(TimeZone.getTimeZone("UTC"));
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] part = line.split("\t");
            try {
                System.out.println(line + "\t" + CompletableFuture.supplyAsync(
                    () -> answer(part[0], part[1], ZoneId.of(part[2]), Instant.parse(part[3]).getEpochSecond()),
                    work -> { Thread thread = new Thread(work); thread.setDaemon(true); thread.start(); }).get(2, TimeUnit.SECONDS));
            } catch (TimeoutException e) {
                System.err.println("too slow: " + line);
            }
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    static String answer(String dialect, String expression, ZoneId zone, long start) {
        StringBuilder found = new StringBuilder();
        try {
            LongFunction<Long> next = evaluator(dialect, expression, zone);
            long at = start;
            for (int n = 0; n < TIMES; n++) {
                Long then = next.apply(at);
                if (then == null) {
                    found.append(found.length() == 0 ? "" : " ").append("never");
                    break;
                }
                found.append(found.length() == 0 ? "" : " ").append(Instant.ofEpochSecond(then));
                at = then;
            }
            return found.toString();
        } catch (Exception | StackOverflowError e) {
            return "refused";
        }
    }

    static LongFunction<Long> evaluator(String dialect, String expression, ZoneId zone) throws Exception {
        switch (dialect) {
            case "QUARTZ": {
                CronExpression cron = new CronExpression(expression);
                cron.setTimeZone(TimeZone.getTimeZone(zone));
                return at -> {
                    Date next = cron.getNextValidTimeAfter(new Date(at * 1000));
                    return next == null ? null : (Long) (next.getTime() / 1000);
                };
            }
            case "SPRING": {
                var cron = org.springframework.scheduling.support.CronExpression.parse(expression);
                return at -> {
                    ZonedDateTime next = cron.next(Instant.ofEpochSecond(at).atZone(zone));
                    return next == null ? null : (Long) next.toEpochSecond();
                };
            }
            case "CRON4J": {
                new Predictor(expression, 0);
                return at -> {
                    Predictor predictor = new Predictor(expression, at * 1000);
                    predictor.setTimeZone(TimeZone.getTimeZone(zone));
                    return predictor.nextMatchingTime() / 1000;
                };
            }
            case "UNIX": {
                var cron = new CronParser(CronDefinitionBuilder.instanceDefinitionFor(CronType.UNIX)).parse(expression);
                ExecutionTime times = ExecutionTime.forCron(cron);
                return at -> times.nextExecution(Instant.ofEpochSecond(at).atZone(zone)).map(ZonedDateTime::toEpochSecond).orElse(null);
            }
            default:
                throw new IllegalArgumentException(dialect);
        }
    }
}
